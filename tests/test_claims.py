"""Every measured number and every "with each seed" in the README's sentences, anew from the json files in results/."""

import contextlib
import math
import re

import numpy as np
from conftest import ROOT

from model import GPT, GPTConfig, read_json

README = (ROOT / "README.md").read_text(encoding="utf-8")
X1, X2, X4, X8, X16 = range(5)  # columns: the multiples of the training length
MEASURED = r"(?<!section )\d\.\d+(?!\d|B)|\d %|±|(?:each|every) seed"


@contextlib.contextmanager
def section(start, end="\n#"):
    """says(sentence): the README's text between `start` and `end` must have it. In the end no measured number may be left."""
    text = README.split(f"{start}\n", 1)[1].split(end)[0]
    text = re.sub(r"<!-- table (\w+) -->.*?<!-- end \1 -->|`[^`]+`|\]\([^)]*\)", "", text, flags=re.S)
    rest = [" ".join(text.split())]

    def says(sentence):
        assert sentence in rest[0], f"the README does not say: {sentence}\nbut: {rest[0]}"
        rest[0] = rest[0].replace(sentence, "...", 1)

    yield says
    left = re.findall(rf".{{0,60}}(?:{MEASURED}).{{0,40}}", rest[0])
    assert not left, f"nothing checks these: {left}"


def measured(folder, kind, measure, names, seeds=3):
    """For each name the (seed, length) array of `measure` in results/FOLDER/NAME_sSEED_KIND.json."""
    for name in names:
        runs = [read_json(ROOT / f"results/{folder}/{name}_s{seed}_{kind}.json")["lengths"] for seed in range(seeds)]
        yield np.array([[row[measure] for row in run.values()] for run in runs])


def perplexity(folder, *names, **seeds):
    return measured(folder, "perplexity", "perplexity", names, **seeds)


def whole_keys(folder, *names, **seeds):
    return (100 * runs for runs in measured(folder, "passkey", "accuracy", names, **seeds))


def digits(folder, *names, **seeds):
    return (100 * runs for runs in measured(folder, "passkey", "token_accuracy", names, **seeds))


def mean(*several):
    return [runs.mean(axis=0) for runs in several]


def growth(runs):
    """Mean at 16x over mean at 1x."""
    return runs[:, X16].mean() / runs[:, X1].mean()


def undecided(a, b):
    """Where not all seeds have the same sign, by length."""
    return ~((a < b).all(axis=0) | (a > b).all(axis=0))


DEMO = ("nope", "alibi", "rope", "fope")
ALL = (*DEMO, "kerple", "fire", "rope_a")


def all_digits():
    """Digits found by all models of RoPE and FoPE: those of zero_gain.py, and where these are not the same bits, the demo's."""
    rope, rope_again = next(digits("demo", "rope")), next(digits("zero_gain", "rope_g1", seeds=5))
    assert np.array_equal(rope, rope_again[:3])
    return rope_again, np.concatenate([*digits("demo", "fope"), *digits("zero_gain", "fope_g2", seeds=5)])


def test_demo():
    nope, alibi, rope, fope = perplexity("demo", *DEMO)
    _, _, r, f = mean(nope, alibi, rope, fope)
    keys = list(whole_keys("demo", *DEMO))
    _, _, rope_digits, fope_digits = digits("demo", *DEMO)
    _, ak, rk, fk = mean(*keys)
    rd, fd = mean(rope_digits, fope_digits)
    assert (fope_digits > rope_digits)[:, X4:].all() and (keys[3] > keys[2])[:, X4].all()
    assert (keys[1] > keys[3])[:, X2:].all() and (rope < fope)[:, X1].all() and (fope < alibi).all()
    with section("# FoPE, from scratch", "\n!") as says:
        says(f"RoPE's perplexity climbs from {r[X1]:.1f} to {r[X16]:.1f} and FoPE's from {f[X1]:.1f} to {f[X16]:.1f}")
        all_rope, all_fope = (runs[:, X4].mean() for runs in all_digits())
        says(f"RoPE still has {all_rope:.0f} % right at four times that length and FoPE {all_fope:.0f} %")
    with section("How to read them:", "\nThen read") as says:
        says("± is the standard deviation over seeds in tables and figures, and a standard error where a difference is given")
        says("*With each seed* means")
        says("1.2 minutes a model")  # from the logs: no json has it
        says(f"({r[X1]:.2f} against {f[X1]:.2f}, with each seed)")
        says(f"has grown by {100 * growth(fope) - 100:.0f} % at 16x")
        says(f"nearly flat ({100 * growth(alibi) - 100:.0f} % and {100 * growth(nope) - 100:.0f} % at 16x)")
        at_1x = np.sort(np.concatenate(keys)[:, X1])
        assert at_1x[1] > 99
        says(f"find the keys at the training length, with every seed (RoPE once {at_1x[0]:.0f} %)")
        says(f"RoPE falls to {rk[X2]:.0f} % at 2x and {rk[X4]:.0f} at 4x, FoPE to {fk[X2]:.0f} and {fk[X4]:.0f}, at 4x above")
        says("RoPE with each seed")
        says(f"at 4x FoPE has {fd[X4]:.0f} % of them right and RoPE {rd[X4]:.0f} %, at 16x {fd[X16]:.0f} and {rd[X16]:.0f} (")
        says("10 % is chance), again with each seed")
        assert all_fope - all_rope < fd[X4] - rd[X4]  # more models bring the two nearer
        says(f"it finds {ak[X2]:.0f} % at 2x and {ak[X4]:.0f} % at 4x, and then falls")
        says(f"to {ak[X16]:.0f} % at 16x")
    with section("## Ours against the paper") as says:
        says(f"at 16x RoPE's perplexity is {growth(rope):.1f} times its value at 1x, FoPE's {growth(fope):.1f} times")
        says(f"first half nearly: {rk[X1]:.0f} % at 1x, {rk[X2]:.0f} % at 2x")
        says(f"FoPE falls to {fk[X2]:.0f} % at 2x and {fk[X4]:.0f} % at 4x. At 4x that is above RoPE with each seed")
        says(f"first half reproduced, {alibi[:, X1].mean():.1f} to {alibi[:, X16].mean():.1f}")
        says("FoPE's is better than ALiBi's at every length here, with each seed")
        says(f"reproduced: {', '.join(f'{k:.0f}' for k in ak)} %")
        says("That is more than FoPE's at every length past 1x, with each seed")


def test_all_seven():
    text = dict(zip(ALL, perplexity("baselines", *ALL), strict=True))
    keys = dict(zip(ALL, whole_keys("baselines", *ALL), strict=True))
    kerple, fire, fope = text["kerple"], text["fire"], text["fope"]
    assert all((kerple < text[name]).all() for name in ALL if name != "kerple")
    for name in set(ALL) - {"kerple", "alibi"}:
        assert all((keys[best] > keys[name])[:, X2:].all() for best in ("kerple", "alibi"))
    assert all(growth(fope) < growth(text[name]) for name in ("rope", "rope_a", "fire"))
    with section("### All seven embeddings") as says:
        k = kerple.mean(axis=0)
        says(f"KERPLE is flat in perplexity ({k[X1]:.2f} at 1x, {k[X16]:.2f} at 16x)")
        says("fits best at every length, with each seed")
        says("KERPLE and ALiBi find more passkeys than all others at every length past 1x, with each seed")
        assert (fire < fope)[:, : X4 + 1].all() and (fire > fope)[:, X8:].all()
        says("a little better than FoPE up to 4x and a little worse from 8x, with each seed")
        f = keys["fire"].mean(axis=0)
        says(f"Its whole passkeys fall from {f[X2]:.0f} % at 2x to {f[X4]:.0f} at 4x")
        assert (text["rope_a"] > text["rope"])[:, X2:].all() and (keys["rope_a"] > keys["rope"])[:, X2].all()
        says("worse than RoPE in perplexity past 1x, with each seed; better in whole passkeys at 2x with each seed")
        says(f"{keys['rope_a'][:, X2].mean():.0f} % against {keys['rope'][:, X2].mean():.0f}")


def test_what_a_seed_is_worth():
    for pos in ALL:
        for seed in (0, 1):
            runs = [read_json(ROOT / f"results/repeated/{n}/{pos}_s{seed}_perplexity.json") for n in ("once", "again")]
            curves = zip(*(run["curve"] for run in runs), strict=True)
            for _, (before, after) in zip(range(10), curves, strict=False):  # one for each 10 steps
                assert abs(before[1] - after[1]) < 1.01e-4
            pairs = zip(*(run["lengths"].values() for run in runs), strict=True)
            changes = [abs(after["perplexity"] / before["perplexity"] - 1) for before, after in pairs]
            assert changes[0] < 0.005 and max(changes) < (0.054 if pos in ("rope", "fope", "rope_a") else 1e-4)

    folders = {"once": 3, "again": 2, "zero_gain": 5}  # and their seeds

    def ten_of_the_earlier_recipe(kind, *names):
        """(seed, length) of the two repetitions and zero_gain.py, whose names for a model are these."""
        runs = [next(kind(f"repeated/{f}", n, seeds=seeds)) for (f, seeds), n in zip(folders.items(), names, strict=True)]
        return np.concatenate(runs)

    before, before_keys = (
        [ten_of_the_earlier_recipe(kind, *names) for names in (("rope", "rope", "rope_g1"), ("fope", "fope", "fope_g2"))]
        for kind in (digits, whole_keys)
    )
    assert all(len(runs) == 10 for runs in before)
    with section("### What a seed is worth") as says:
        says("(weights started with a standard deviation of 0.02 instead of 0.05, ")
        says("within 0.5 % at the training length and 5.4 % at 16x, and for NoPE, ALiBi, KERPLE and FIRE to 0.01 %")
        for pos, column, sentence in (
            ("alibi", X2, "ALiBi found {:.0f} % of them at 2x and the second time {:.0f} %"),
            ("kerple", X16, "KERPLE {:.0f} and {:.0f} % at 16x"),
            ("nope", X1, "NoPE {:.0f} and {:.0f} % at 1x"),
        ):
            says(sentence.format(*(next(whole_keys(f"repeated/{n}", pos, seeds=2))[0, column] for n in ("once", "again"))))
        first, second = (next(whole_keys(f"repeated/{n}", "rope", seeds=folders[n]))[:, X2] for n in ("once", "again"))
        says(f"RoPE's three seeds found {first.mean():.0f} ± {first.std(ddof=1):.0f} % at 2x")
        says("two of them the second time {:.0f} and {:.0f} %".format(*second))
        for (rope, fope), find in ((all_digits(), "now RoPE finds"), (before, "before, RoPE found")):
            r, f = rope[:, X4], fope[:, X4]
            error = np.sqrt(r.var(ddof=1) / len(r) + f.var(ddof=1) / len(f))
            says(f"{find} {r.mean():.0f} % ({r.min():.0f} to {r.max():.0f}) and FoPE {f.mean():.0f} % (")
            says(f"{f.min():.0f} to {f.max():.0f}), which")
            says(f"differ by {f.mean() - r.mean():.0f} ± {error:.0f}")
        now = [next(whole_keys("zero_gain", "rope_g1", seeds=5))]
        now += [np.concatenate([*whole_keys("demo", "fope"), *whole_keys("zero_gain", "fope_g2", seeds=5)])]
        for (rope, fope), when in ((now, "now"), (before_keys, "before")):
            r, f = rope[:, X2], fope[:, X2]
            says(f"{when} {r.mean():.0f} % ({r.min():g} to {r.max():.0f}) and {f.mean():.0f} % ({f.min():g} to {f.max():.0f})")


def test_qk_norm():
    names = ("rope", "rope_qk", "rope_a", "rope_a_qk", "nope", "nope_qk", "fope", "fope_qk")
    runs = list(measured("qk_norm", "perplexity", "loss", names))
    rope, rope_qk, rope_a, rope_a_qk, nope, nope_qk, fope, fope_qk = runs
    r, rqk, ra, raqk, _, _, f, _ = mean(*runs)
    with section("### QK-norm and aligned frequencies") as says:
        # the paper's
        says("from 5.50 at 1x to 7.16 at 16x for RoPE, with QK-norm from 5.46 to 6.66; for RoPE-A from 5.72 to 6.67")
        says("with QK-norm from 5.69 to 6.81; for NoPE from 5.65 to 6.99, with QK-norm from 5.59 to 7.43")
        assert (rope_qk < rope).all()
        says(f"at 16x {rqk[X16]:.2f} instead of {r[X16]:.2f}, and {rqk[X1]:.2f} instead of {r[X1]:.2f} at 1x, with each seed")
        assert (nope_qk > nope)[:, :X8].all() and not (nope_qk < nope)[:, X8:].all(axis=0).any()
        says("worse up to 4x with each seed, and no better beyond")
        assert (rope_a_qk < rope_a).all() and (rope_a_qk > rope)[:, X2:].all()
        says(f"better at every length with each seed, at 16x {raqk[X16]:.2f} instead of {ra[X16]:.2f}, and still worse past 1x")
        assert (rope_a > rope)[:, X2:].all() and f"{r[X1]:.2f}" == f"{ra[X1]:.2f}"
        says(f"the same fit ({r[X1]:.2f}), and worse than RoPE from 2x on with each seed")
        assert (rope_qk < fope)[:, :X8].all() and (rope_qk > fope)[:, X8:].all()
        says(f"RoPE with QK-norm fits better ({rqk[X1]:.2f} against {f[X1]:.2f}) and is ahead up to 4x, behind from 8x")
        says(f"(at 16x {rqk[X16]:.2f} against {f[X16]:.2f}), all with each seed")
        assert (fope_qk < fope)[:, :X16].all() and (fope_qk > fope)[:, X16].all() and (fope_qk < rope_qk)[:, X8:].all()
        says("FoPE gains from QK-norm up to 8x and loses at 16x, with each seed; with it on both, FoPE is ahead from 8x")


def test_halves_and_hyper_parameters():
    rope, fope, cf, fs = perplexity("ablation_halves", "rope", "fope", "fope_cf", "fope_fs")
    equations, equations_1, equations_3 = perplexity("ablation_variant", "fope_paper0", "fope_paper0.1", "fope_paper0.3")
    sigma_1, sigma_2, sigma_4, sigma_5 = perplexity("ablation_sigma", *(f"fope_sigma0.{i}" for i in (1, 2, 4, 5)))
    r, f, c, s, e, e1, e3, s1, s2, s4, s5 = mean(
        rope, fope, cf, fs, equations, equations_1, equations_3, sigma_1, sigma_2, sigma_4, sigma_5
    )
    d2, d4 = perplexity("ablation_D", "fope_D2", "fope_D4")
    with section("### Which part of FoPE does it") as says:
        assert all((better < worse)[:, X2:].all() for better, worse in ((fs, rope), (cf, rope), (fope, cf), (fope, fs)))
        says("reproduced past 1x, with each seed: ")
        says(f"at 16x {r[X16]:.1f} for RoPE, {s[X16]:.1f} with the series, {c[X16]:.1f} with the floor, {f[X16]:.1f} with both")
        assert (cf > rope)[:, X1].all() and undecided(fs, rope)[X1]
        costs = (cf - rope)[:, X1]
        says(f"At 1x it costs {costs.mean():.1f} ({costs.min():.2f} to {costs.max():.2f} with each seed), the series nothing")
        says(f"with the equations' padding and no noise, 1x is {e[X1]:.2f}, RoPE's {r[X1]:.2f}")
        says("sigma 0.3 is best at 60M")  # the paper's
        assert undecided(fope, sigma_4)[X16] and undecided(fope, sigma_5)[X16] and undecided(sigma_4, sigma_5)[X16]
        says(f"0.3, 0.4 and 0.5 are not told apart ({f[X16]:.2f}, {s4[X16]:.2f} and {s5[X16]:.2f} at 16x)")
        assert all((less > fope)[:, X16].all() for less in (sigma_2, sigma_1, cf))
        says("Below that it reads less far, with each seed: ")
        says(f"{s2[X16]:.2f} with 0.2, {s1[X16]:.2f} with 0.1, {c[X16]:.2f} with none")
        worse_2, worse_4 = (100 * (d.mean(axis=0) / f - 1) for d in (d2, d4))
        says(f"at most {max(worse_2):.0f} % worse")
        assert (d4 > fope).all()
        says(f"4K is worse at every length with each seed, by {worse_4[X1]:.0f} % at 1x and {worse_4[X16]:.0f} % at 16x")
        numbers = []
        for pos, plain in (("fope", fope), ("rope", rope)):
            one, four, seven = shapes = list(
                perplexity("ablation_shape", *(f"{pos}_{n}" for n in ("1x128", "4x32", "7layers")))
            )
            assert (one < np.minimum(np.minimum(plain, four), seven))[:, X16].all()
            numbers.append(
                "{:.1f} against {:.1f}, {:.1f} and {:.1f}".format(*(v[:, X16].mean() for v in (one, plain, four, seven)))
            )
            if pos == "fope":
                assert (one > four)[:, X1].all()
                fit = "with FoPE {:.2f} against {:.2f} with 4 of 32".format(*(v[:, X1].mean() for v in shapes[:2]))
        says("one head of 128 reads further than 2 of 64, 4 of 32 or 7 layers, with each seed")
        says("with FoPE ({} at 16x) and with RoPE ({})".format(*numbers))
        says(fit)
        small, large = (sigma * math.sqrt(2 / (11 * (11 + 2))) for sigma in (0.1, 0.5))  # FoPE.draw_noise: D = K = 11, 2 heads
        says(f"sigma of 0.1 to 0.5 is a standard deviation of {small:.3f} to {large:.3f}")
        numbers = f"{e1[X16]:.2f} and {s5[X16]:.2f} at 16x, {e1[X1]:.2f} and {s5[X1]:.2f} at 1x"
        says(f"The equations' 0.1 does as well as the released 0.5 ({numbers})")
        assert (equations_3 > fope)[:, [X1, X16]].all()
        says(f"their 0.3, the paper's number taken literally, costs fit ({e3[X1]:.2f}) and length ({e3[X16]:.2f})")
        shapes = [(4, 2, 128), (4, 4, 128), (4, 1, 128), (2, 3, 192), (7, 2, 96)]
        models = [GPT(GPTConfig(n_layer=a, n_head=b, n_embd=c, vocab_size=257, train_len=128)) for a, b, c in shapes]
        sizes = [sum(p.numel() for p in model.blocks.parameters()) / 1e6 for model in models]
        says(f"All shapes have {min(sizes):.2f} to {max(sizes):.2f} million parameters")


def test_reading_further():
    rope, yarn, warm, fope = perplexity("extrapolate", "rope", "rope_yarn4", "rope_warm", "fope")
    fope_yarn, fope_yarn_16 = perplexity("extrapolate", "fope_yarn4", "fope_yarn16")
    r, y, w, f = mean(rope, yarn, warm, fope)
    with section("### Reading further than the training length") as says:
        assert max(y[:X8]) - min(y[:X8]) < 0.03 and y[X16] > 2 * y[X4]
        says(f"RoPE is flat up to 512, at a cost of {y[X1] - r[X1]:.1f} at the training length, and breaks beyond")
        assert (fope < yarn)[:, X1].all() and (fope > yarn)[:, X4].all() and (fope < yarn)[:, X8:].all()
        says(f"gains {y[X1] - f[X1]:.1f} at 1x, loses {f[X4] - y[X4]:.1f} at 4x and is far better beyond, each with every seed")
        assert (fope_yarn_16 > fope).all() and (fope_yarn > fope)[:, [X1, X8, X16]].all() and max(abs(w / y - 1)) < 0.02
        says("stretched 16 times it is worse at every length, stretched four times at 1x and from 8x, with each seed")
        names = ("rope_rope", "rope_yarn", "rope_fope", "fope_fope", "fope_yarn")
        rope_rope, rope_yarn, rope_fope, fope_fope, fope_yarn = perplexity("continued", *names)
        rr, ry, rf, ff, fy = (v[X16] for v in mean(rope_rope, rope_yarn, rope_fope, fope_fope, fope_yarn))
        assert (rope_fope < rope_yarn)[:, X16].all() and (fope_fope < fope_yarn)[:, X16].all()
        says(f"from RoPE's weights FoPE ends at {rf:.2f} at 16x, YaRN at {ry:.1f}")
        says(f"from FoPE's weights {ff:.2f} and {fy:.2f}, all with each seed")
        assert (fope_yarn < rope_yarn)[:, X16].all()
        says(f"reproduced: {fy:.2f} against {ry:.1f} at 16x, with each seed")
        assert (rope_rope < rope_yarn)[:, X2:].all()
        says(f"better than RoPE + YaRN at every length past the new one, {rr:.1f} against {ry:.1f} at 16x, with each seed")
        assert (fope_fope < rope_rope)[:, X4:].all()
        says("FoPE to FoPE is ahead of this one, too, from 4x on with each seed")
        assert (rope_fope < fope_fope)[:, X16].all() and undecided(rope_fope, fope_fope)[:X16].all()
        says(f"{rf:.2f} at 16x against {ff:.2f} for FoPE from the start, with each seed. Up to 8x the two are not told apart")


def test_gain_of_the_dimensions_under_the_floor():
    def summary(name):
        return read_json(ROOT / f"results/zero_gain/summary_{name}.json")

    usual, small, passkey = (summary(name) for name in ("perplexity", "perplexity_std0.02", "passkey"))

    def gained(length, method="FoPE", result=usual):
        """{g: (difference to g = 1 of each seed, how the README writes it)} at a multiple of the training length."""
        values = np.array(result[method]["values_by_gain_seed_length"])[..., length]
        differences = values - values[result[method]["gains"].index(1)]
        error = differences.std(axis=1, ddof=1) / math.sqrt(values.shape[1])
        texts = [f"{d.mean():.3f} ± {e:.3f}" for d, e in zip(differences, error, strict=True)]
        return dict(zip(result[method]["gains"], zip(differences, texts, strict=True), strict=True))

    with section("### How much should the dimensions under the floor weigh?") as says:
        near, far, cf_near, cf_far = (gained(x, m) for m in ("FoPE", "FoPE, CF alone") for x in (X1, X16))
        assert (near[2][0] > 0).all() and (cf_near[2][0] > 0).all()
        assert all(not (d > 0).all() and not (d < 0).all() for d, _ in (far[2], cf_far[2]))
        says(f"a little worse at 1x, by {near[2][1]} with each seed, and not told apart at 16x ({far[2][1]})")
        says(f"Without the noise (CF alone) {cf_near[2][1]} with each seed, and {cf_far[2][1]}")
        assert all((near[g][0] > 0).all() and far[g][0].mean() > 0 for g in (4, 8))
        says(f"4 and 8 fit worse with each seed (by {near[4][1]} and {near[8][1]}) and read no further")
        says(f"0.5 fits as well as 1 ({near[0.5][1]}) and reads, if anything, less far: at 16x {far[0.5][1]}")
        assert (cf_far[0.5][0] > 0).all()
        says(f"without the noise {cf_far[0.5][1]}, the latter with each seed")
        rope = gained(X16, "RoPE")
        assert (rope[2][0] > 0).all()
        says(f"2 is worse than 1 at 16x by {rope[2][1]}, with each seed, and 0.5 is, if anything, better ({rope[0.5][1]})")
        near, far = (gained(x, result=small) for x in (X1, X16))
        says("With a standard deviation of 0.02")
        says(f"4 costs nothing at 1x ({near[4][1]}), and 8 is, if anything, ahead at 16x ({far[8][1]}) for {near[8][1]} at 1x")
        one = np.array(usual["FoPE"]["values_by_gain_seed_length"])[usual["FoPE"]["gains"].index(1)]
        ahead = np.array(small["FoPE"]["values_by_gain_seed_length"]) - one  # (gain, seed, length)
        says(f"with 0.05, g = 1 is ahead of every g with 0.02, by {ahead[..., X1].min():.2f} at least at 1x with each seed")
        says(f"at 16x in {(ahead[..., X16] > 0).sum()} of {ahead[..., X16].size} pairs")

        fope, cf, rope = ([gained(x, m, passkey) for x in range(5)] for m in ("FoPE", "FoPE, CF alone", "RoPE"))
        assert all(method[x][g][0].mean() > 0 for method in (fope, cf) for x in (X2, X4, X8, X16) for g in (2, 4, 8))
        assert all((d > 0).all() for d in (cf[X4][4][0], fope[X4][8][0], fope[X16][8][0]))
        says(f"Most clearly 4 without it (at 4x by {cf[X4][4][1]}) and 8 with it (at 4x by {fope[X4][8][1]}, at 16x by")
        says(f"{fope[X16][8][1]}), each with each seed")

        def pairs(g, other, x):
            return np.concatenate([method[x][g][0] - method[x][other][0] for method in (fope, cf)])

        numbers = []
        for d in (pairs(4, 2, X4), pairs(4, 1, X4), pairs(2, 1, X4)):
            numbers += [f"{(d > 0).sum()}", f"{d.mean():.3f} ± {d.std(ddof=1) / math.sqrt(10):.3f}"]
        others = sorted(pairs(4, 2, x).mean() for x in (X2, X8, X16))
        says(f"ahead of 2 in {numbers[0]} of 10 pairs, by {numbers[1]}")
        says(f"(at the other lengths by {others[0]:.2f} to {others[-1]:.2f})")
        says("and of 1 in {}, by {}; 2 is ahead of 1 in {}, by {}".format(*numbers[2:]))
        names = {g: [f"{m}_g{g}" for m in ("fope", "fope_cf_alone", "rope")] for g in (1, 2, 4, 8)}
        bad = {g: sum((keys[:, X1] < 90).sum() for keys in whole_keys("zero_gain", *names[g], seeds=5)) for g in names}
        assert bad[1] + bad[2] + bad[4] == 2
        says(f"{bad[8]} of its 15 models find less than 90 % of the keys, of the other 45 models two")
        assert not any((d > 0).all() or (d < 0).all() for x in (X2, X4, X8, X16) for g in (2, 4, 8) for d, _ in [rope[x][g]])
        says("(at 4x {}, {} and {} for 2, 4 and 8)".format(*(rope[X4][g][1] for g in (2, 4, 8))))
        drawn = [method[x][g][0] for method in (fope, cf, rope) for x in (X2, X4) for g in (2, 4, 8)]
        assert len(drawn) == 18 and sum((d > 0).all() or (d < 0).all() for d in drawn) == 3


def test_mechanism():
    def result(name):
        return read_json(ROOT / f"results/mechanism/{name}.json")

    leakage, toy, relative = result("spectrum_leakage"), result("toy_fourier"), result("relative")
    with section("## See why it works") as says:
        says("3.2, 3.3, Lemma 3.1")  # places in the paper
        own = np.mean(leakage["linear"]["own_share_by_dimension"])
        says(f"A linear layer leaves {100 * own:.0f} % of a dimension's energy at its own frequency")
        lemma = [leakage["lemma_3_1"][g] for g in ("ReLU", "GELU", "SiLU")]
        says("move {:.0f}, {:.0f} and {:.0f} % of two tones' energy".format(*(100 * g["new_share"] for g in lemma)))
        assert min(g["predicted_share"] for g in lemma) > 0.999
        left_out = sorted(100 * (g["predicted_share"] - g["printed_share"]) for g in lemma)
        says(f"over 99.9 % of it to j w1 + k w2, as the lemma says; but {left_out[0]:.0f} to {left_out[-1]:.0f} % of it where")
        cut = leakage["truncation"]
        under = np.array(cut["freqs"]) < cut["floor"]
        wrong = 100 * np.array(cut["misplaced_energy"])
        says(f"have {wrong[under].mean():.0f} % of their energy in the wrong place, those above {wrong[~under].mean():.0f} %")
        closer = {sigma: toy["errors"][f"FoPE, sigma {sigma}"]["closer_than_rope"] for sigma in (0.02, 0.3)}
        draws = f"{toy['seeds'] * closer[0.3]:.0f} of {toy['seeds']} draws"
        says(f"with sigma 0.3 the random series was closer to the ground truth than RoPE in {draws}")
        says(f"with sigma 0.02 in {100 * closer[0.02]:.0f} %")
        noise = {
            variant: 100 * relative["not_relative"][variant][relative["sigma"].index(0.3)] for variant in ("paper", "released")
        }
        says(f"(sigma 0.3) {noise['paper']:.0f} % of the score's standard deviation is no function of i - j")
        says(f"with the released code's {noise['released']:.0f} %; RoPE's {100 * relative['rope']:.0f}")
        rope = result("qk_activation_rope")
        assert f"{rope['ratio_q']:.1f}" == f"{rope['ratio_k']:.1f}"
        says(f"queries and keys are {rope['ratio_q']:.1f} times as large as above it")
        best = {pos: result(f"attention_map_{pos}")["best"] for pos in ("rope", "fope", "alibi")}
        assert all((best[pos]["statement"], best[pos]["offset"]) == (1, -1) for pos in ("rope", "fope"))
        assert (best["alibi"]["statement"], best["alibi"]["offset"]) == (0, 0)
        r, f = best["rope"]["percent"], best["fope"]["percent"]
        says(f"FoPE's keeps {f[X2]:.0f} of {f[X1]:.0f} % there and RoPE's {r[X2]:.0f} of {r[X1]:.0f} %")
        says(f"at four times {f[X4]:.0f} and {r[X4]:.0f} %")


def test_cost():
    summary = read_json(ROOT / "results/bench/20M_cpu.json")["summary"]
    kerple, fire, rope_a = (summary[pos]["to_rope"] for pos in ("kerple", "fire", "rope_a"))
    with section("### What it costs", "\nOn a GPU:") as says:
        says(f"read 8192 tokens {1 / kerple['eval']:.1f} and {1 / fire['eval']:.0f} times as slowly")
        says(f"their ratio, {rope_a['train']:.2f} in training and {rope_a['eval']:.2f} in reading")
