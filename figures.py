"""
The paper's figures and tables as data: which models, how they are trained, what they are read on.
paper.py makes them.
"""

from dataclasses import dataclass, field, replace

from tables import NAMES

# --- the figures and tables


@dataclass
class Model:
    """One line of a figure: a model that is trained, or one that is evaluated once more."""

    name: str  # of its folder, which ends in _sSEED
    label: str | None = None  # in figures; None: its embedding's name
    flags: str = ""  # of train.py; paper.py's model_flags() fills in what is in braces
    tiny_flags: str = ""  # and these at tiny size
    init_from: str | None = None  # the model that it goes on from, at twice the length
    # with these flags init_from is evaluated once more, and nothing is trained
    eval_flags: str = ""
    shown: bool = True  # false: it is only there for others to start from


@dataclass
class Figure:
    title: str
    models: tuple
    kinds: tuple = ("text",)  # of models: what takes longest first
    measure: str = "perplexity"
    trained_on: str = ""  # a data folder, if not that of the kind
    corpora: tuple = ("",)  # data folders that are read; "": the one trained on
    share: float = 0.1  # of the tokens, for models that go on from others
    depth: bool = False  # draw passkeys by depth, too
    ratio: bool = False  # and the ratio of the perplexities on the two corpora
    tiny_only: bool = False  # its flags are for the tiny size


def plain(*names, **kwargs):
    return tuple(Model(name, None, f"--pos {name}", **kwargs) for name in names)


def fope(name, label, pos_args):
    return Model(f"fope_{name}", f"FoPE, {label}", f"--pos fope --pos_args {pos_args}")


def shape(name, label, flags):
    """RoPE and FoPE in another shape of model."""
    pair = (("rope", "RoPE"), ("fope", "FoPE"))
    return [Model(f"{pos}_{name}", f"{p}, {label}", f"--pos {pos} {flags}") for pos, p in pair]


def again(init_from, name, label, eval_flags):
    return Model(f"{init_from}_{name}", label, init_from=init_from, eval_flags=eval_flags)


FOUR, PAIR = plain("nope", "alibi", "rope", "fope"), plain("rope", "fope")
BOTH = ("passkey", "text")
SEVEN = (*FOUR, *plain("kerple", "fire", "rope_a"))
# what the check of learning rates found (rates_text): all others keep the preset's
FIRE = Model("fire_fast", "FIRE", "--pos fire", "--lr 4e-3")
CF, FS = fope("cf", "CF alone", "sigma=0"), fope("fs", "FS alone", "floor=false")
FS_MATCHED = fope("fs_matched", "FS alone, FoPE's table noise", "floor=false sigma={fs_sigma}")

YARN16, YARN4 = "--yarn_scale 16", "--yarn_scale 4"
WARM16 = f"{YARN16} --yarn_temperature"
CONTINUED = (
    *plain("rope", "fope", shown=False),
    Model("rope_rope", "RoPE to RoPE", "", init_from="rope"),
    Model("rope_yarn16", "RoPE to RoPE + YaRN x16", YARN16, init_from="rope"),
    Model("rope_warm16", "RoPE to RoPE + YaRN x16, temperature", WARM16, init_from="rope"),
    Model("rope_yarn4", "RoPE to RoPE + YaRN x4", YARN4, init_from="rope"),
    Model("rope_fope", "RoPE to FoPE", "--pos fope", init_from="rope"),
    Model("fope_fope", "FoPE to FoPE", "", init_from="fope"),
    Model("fope_yarn16", "FoPE to FoPE + YaRN x16", YARN16, init_from="fope"),
    Model("fope_yarn4", "FoPE to FoPE + YaRN x4", YARN4, init_from="fope"),
    Model(
        "fope_floor2",
        "FoPE to FoPE + YaRN x16, floor of 2x",
        f"{YARN16} --pos_args floor={{len2}}",
        init_from="fope",
    ),
)


def changed(name, flags=""):
    """The same with other folders and further flags for what is continued."""
    return tuple(
        replace(m, name=f"{m.name}_{name}", flags=f"{m.flags} {flags}") if m.init_from else m
        for m in CONTINUED
    )


UNTRAINED = (
    *PAIR,
    again("rope", "yarn4", "RoPE, YaRN x4", YARN4),
    again("rope", "yarn16", "RoPE, YaRN x16", YARN16),
    again("rope", "warm", "RoPE, YaRN x4, temperature", f"{YARN4} --yarn_temperature"),
    again("rope", "pi4", "RoPE, interpolation x4", "--pi_scale 4"),
    again("fope", "yarn4", "FoPE, YaRN x4", YARN4),
    again("fope", "yarn16", "FoPE, YaRN x16", YARN16),
)
SHAPES = (
    *PAIR,
    *shape("wider", "2 heads of 128", "--n_head 2 --head_dim 128"),
    *shape("more", "8 heads of 32", "--n_head 8 --head_dim 32"),
    *shape("deeper", "8 layers, width 80", "--n_layer 8 --n_embd 80"),
)
DOUBLED = (
    *plain("fope"),
    Model("fope_head_dim2", "FoPE, 4 heads of 128", "--pos fope --head_dim 128"),
    Model("fope_heads2", "FoPE, 8 heads of 64", "--pos fope --n_head 8"),
    Model("fope_layers2", "FoPE, 8 layers", "--pos fope --n_layer 8"),
)
SIGMAS = [fope(f"sigma{s}", f"sigma {s}", f"sigma={s}") for s in (0.1, 0.2, 0.4, 0.5)]
DS = [fope(f"D{n}", f"D = {n}K", f"n_freq={{D{n}}}") for n in (2, 4, 8)]
DS += [
    fope(f"D{n}_matched", f"D = {n}K, FoPE's table noise", f"n_freq={{D{n}}} sigma={{D{n}_sigma}}")
    for n in (2, 4, 8)
]
LETTER = "variant=paper sigma"
EQUATIONS = [fope(f"paper{s}", f"equations, sigma {s}", f"{LETTER}={s}") for s in (0, 0.1, 0.3)]
ROUNDED = [
    Model(f"rope_a_{r}", f"RoPE-A, rounded {r}", f"--pos rope_a --pos_args rounding={r}")
    for r in ("up", "down")
]


def with_qk_norm(m):
    label = f"{m.label or NAMES[m.name]} + QK-norm"
    return replace(m, name=f"{m.name}_qk", label=label, flags=f"{m.flags} --qk_norm")


TABLE2 = (*plain("nope", "rope", "fope", "rope_a"), *ROUNDED)
TABLE2 += tuple(map(with_qk_norm, TABLE2))
# a product of two series holds the noise twice, the series on the score once: sqrt(2) * 0.3
READINGS = (
    *PAIR,
    Model("fope_shared", "FoPE, one draw for cos and sin", "--pos fope_shared"),
    Model(
        "fope_relative", "FoPE, series on the score", "--pos fope_relative --pos_args sigma=0.4243"
    ),
)


def at_rates(models, *rates):
    """The models with their preset's learning rate, and with others."""
    changed = [
        replace(
            m, name=f"{m.name}_lr{r}", label=f"{NAMES[m.name]}, {r}", flags=f"{m.flags} --lr {r}"
        )
        for m in models
        for r in rates
    ]
    return (*models, *changed)


BOOKS = dict(trained_on="books", corpora=("books", "c4"))

FIGURES = {
    "rates_text": Figure(
        "other learning rates, text",
        (*at_rates(SEVEN, 1e-3, 4e-3), *at_rates(plain("fire"), 8e-3)[1:]),
        tiny_only=True,
    ),
    "rates_passkey": Figure(
        "other learning rates, passkeys",
        at_rates(FOUR, 1e-3, 2e-3, 4e-3),
        ("passkey",),
        tiny_only=True,
    ),
    "figure1": Figure("perplexity and passkeys of NoPE, ALiBi, RoPE, FoPE", FOUR, BOTH, depth=True),
    "figure1_again": Figure("RoPE and FoPE of figure 1 once more", PAIR, BOTH),
    "figure1_all": Figure("KERPLE, FIRE, RoPE-A, too", (*FOUR, *plain("kerple", "rope_a"), FIRE)),
    "figure4": Figure("a tenth more training at twice the length: YaRN and FoPE", CONTINUED, BOTH),
    "figure4_quarter": Figure("the same with a quarter", changed("quarter"), BOTH, share=0.25),
    "figure4_rate": Figure(
        "the same at a quarter of the rate", changed("slow", "--lr 5e-4"), tiny_only=True
    ),
    "figure4_untrained": Figure("YaRN and interpolation without more training", UNTRAINED),
    "figure5": Figure("from books to C4", FOUR[::-1], **BOOKS),  # FoPE, RoPE first
    "figure6a": Figure("the two halves of FoPE", (*PAIR, CF, FS, FS_MATCHED), **BOOKS, ratio=True),
    "figure6a_double": Figure(
        "head_dim, heads or layers doubled", DOUBLED, **BOOKS, ratio=True, tiny_only=True
    ),
    "figure6a_shape": Figure("layers, heads and width at equal size", SHAPES, tiny_only=True),
    "figure6b": Figure(
        "sigma, the size of FoPE's noise", (*plain("fope"), CF, *SIGMAS), **BOOKS, ratio=True
    ),
    "figure6c": Figure("D, the number of FoPE's frequencies", (*plain("fope"), *DS), BOTH),
    "table2": Figure("QK-norm and aligned frequencies", TABLE2, measure="loss"),
    "equations": Figure("the paper's equations, its code", (*plain("fope"), CF, *EQUATIONS)),
    "readings": Figure("Eq. 11 as a series on the score", READINGS, BOTH),
}

# The comparisons that carry the report's claims, named before the models were trained (the report
# says what was settled later): figure, kind of result, number, label, what it is compared with,
# multiple of the training length. Text has five seeds in them, passkeys ten. "Level" is an interval
# of the difference within 0.05 nats.
TEXT, KEYS = ("perplexity", "loss"), ("passkey", "token_accuracy")
ON_BOOKS = ("perplexity on books", "loss")
PRIMARY = (
    ("figure1", *TEXT, "RoPE", "FoPE", 1),
    ("figure1", *TEXT, "RoPE", "FoPE", 16),
    ("figure1", *TEXT, "ALiBi", "FoPE", 1),
    ("figure1", *TEXT, "ALiBi", "FoPE", 16),
    ("figure1", *KEYS, "RoPE", "FoPE", 4),
    ("figure1", *KEYS, "ALiBi", "FoPE", 4),
    ("figure4", *TEXT, "RoPE to RoPE + YaRN x16", "RoPE to FoPE", 8),
    ("figure6a", *ON_BOOKS, "FoPE, CF alone", "FoPE", 16),
    ("figure6a", *ON_BOOKS, "FoPE, FS alone, FoPE's table noise", "FoPE", 16),
    ("readings", *TEXT, "FoPE, series on the score", "FoPE", 16),
)


@dataclass
class Setting:
    """What a kind of model is trained and evaluated with, beyond its preset in train.py."""

    preset: str
    data: str  # folder of its text, under data/
    amount: int  # validation tokens, or passkeys for each length
    tokens: int | None = None  # to train on; None: the preset's
    # sequences a step for models that go on; released: 512, 1,900 steps for 1B tokens
    continued_batch: int = 512
    amounts: dict = field(default_factory=dict)  # validation tokens of a corpus, if not that many


# Text and passkeys have a model each where their presets differ, otherwise one answers for both.
SETTINGS = {
    "tiny": {
        "text": Setting("tiny", "bytes", 40_961, continued_batch=2),
        "passkey": Setting("tiny_passkey", "bpe", 50, continued_batch=2),
    },
    "quick": {  # the same path with next to no training
        "text": Setting("tiny", "bytes", 16_400, 30_000, 2),
        "passkey": Setting("tiny_passkey", "bpe", 16, 30_000, 2),
    },
    "20M_cpu": {
        "text": Setting("20M_cpu", "books", 2**18 + 1, None, 4, {"c4": 700_000}),
        "passkey": Setting("20M_cpu", "books", 50, continued_batch=4),
    },
}
for size in ("20M", "60M", "180M", "1.2B"):
    SETTINGS[size] = {"text": Setting(size, "c4", 2**22 + 1), "passkey": Setting(size, "c4", 1000)}
TINY = ("tiny", "quick")
ON_CPU = (*TINY, "20M_cpu")  # one model a core; their data is made under runs_out

EVALUATIONS = {"text": ("perplexity", "--max_tokens"), "passkey": ("passkey", "--trials")}

# What is made by itself for the sizes ON_CPU; data of the others takes hours and a disk. {books} is
# the folder of that name.
DATA = {
    "bytes": "--source sotu --tokenizer byte",
    "bpe": "--source sotu --tokenizer bpe:2048",
    "books": "--source gutenberg --unwrap --shards 2 --max_tokens 20000000 --tokenizer {tokenizer}",
    "c4": "--source c4 --max_tokens 1 --tokenizer {books}",
}
TOKENIZERS = {"20M_cpu": "bpe:4096"}  # of the books; else byte
