"""
docs/index.html: its copy of fope.py against fope.py, in a real browser, and its controls.

They need Chromium and its driver (Debian: chromium, chromium-driver) and are skipped without them.
"""

import json
import math
import re
import shutil
import time

import pytest
import torch
from conftest import ROOT

from baselines import slow_down, yarn
from fope import FoPE, RoPE

PAGE = ROOT / "docs" / "index.html"
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")


def test_it_asks_for_nothing():
    text = re.sub("<noscript>.*?</noscript>", "", PAGE.read_text(encoding="utf-8"), flags=re.S)
    outside = r"<link|<img|<iframe|@import|url\((?!#)|src=|fetch\(|import\("
    assert len(text) < 100_000 and not re.search(outside, text)


def test_lines_quoted_are_those_of_fope():
    code = " ".join((ROOT / "fope.py").read_text().split())
    quotations = re.findall(r"<pre><code>(.*?)</code></pre>", PAGE.read_text(), re.S)
    assert len(quotations) >= 4
    for quotation in quotations:
        assert " ".join(quotation.replace("&gt;", ">").split()) in code, quotation


# --- in a browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    selenium = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    if not (CHROMIUM and DRIVER):
        pytest.skip("Chromium and chromedriver are not installed")
    options = selenium.ChromeOptions()
    options.binary_location = CHROMIUM
    profile = tmp_path_factory.mktemp("chromium")
    flags = ["headless", "no-sandbox", "disable-gpu", "disable-background-networking"]
    for flag in [*flags, "window-size=1280,900", f"user-data-dir={profile}"]:
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = selenium.Chrome(options, selenium.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture
def page(browser):
    """The page, opened at a state of its own. The console must stay empty, whatever a test does."""
    browser.get("about:blank")
    browser.get(PAGE.as_uri() + "#position=300")
    yield browser
    assert browser.get_log("browser") == []


SETTINGS = [  # training length, size of a head, heads, theta, variant, floor, cap
    (1024, 64, 8, 1e4, "released", True, True),
    (24, 16, 2, 100, "released", False, True),
    (96, 80, 6, 10, "paper", True, True),
    (256, 128, 1, 10, "released", True, False),
]
NAMES = "trainLen", "headDim", "nHead", "theta", "variant", "floor", "cap"

READ = """
const [setting, positions] = arguments, rope = makeRope(setting), fope = makeFope(setting);
const head = setting.nHead - 1;
const rows = (pos) => positions.map((t) => tablesAt(pos, head, t));
const list = (x) => Array.from(x, (y) => (typeof y === "number" ? y : list(y)));
const of = (pos) => ({
  freqs: list(pos.freqs), cos: rows(pos).map((z) => list(z.cos)),
  sin: rows(pos).map((z) => list(z.sin)),
  between: rows(pos).map((z) => list(Object.values(between(rows(pos).at(-1), z)))),
});
const more = { K: fope.K, own: fope.own, std: fope.std, cos_coef: list(fope.cosCoef),
  sin_coef: list(fope.sinCoef) };
return { rope: of(rope), fope: { ...of(fope), ...more } };
"""


@pytest.mark.slow
@pytest.mark.parametrize("values", SETTINGS)
def test_its_mathematics_is_that_of_fope(page, values):
    setting = dict(zip(NAMES, values, strict=True)) | dict(sigma=0.3, series=True, seed=3)
    L, head_dim, H, theta, *_ = values
    T, generator = 2 * L, torch.Generator().manual_seed(0)
    positions = [0, 1, L // 3, L - 1, L, L + 7, T - 1]
    q, k = torch.randn(2, head_dim, generator=generator)
    theirs = page.execute_script(READ, setting, positions)
    shape = dict(head_dim=head_dim, n_head=H, train_len=L, theta=theta)
    how = {key: setting[key] for key in ("variant", "floor", "cap")}
    fope = FoPE(sigma=0.3, **how, **shape)
    rope, told = RoPE(**shape), theirs["fope"]

    def agree(ours, theirs):
        torch.testing.assert_close(ours, torch.tensor(theirs), rtol=1e-5, atol=1e-5)

    # frequencies, floor, where the weights of 1 are, and the size of the noise
    agree(rope.freqs, theirs["rope"]["freqs"])
    agree(fope.freqs, told["freqs"])
    D, K = fope.cos_coef.shape[1:]
    own = [d if d < D else -1 for d in torch.arange(K).mul(-(-D // K)).tolist()]
    assert (told["K"], told["own"]) == (K, own)
    identity = fope.identity(D, K)
    noise = torch.cat([torch.tensor(told[name]) - identity for name in ("cos_coef", "sin_coef")])
    ours = torch.cat([fope.draw_noise(D, K) for _ in range(500)]).std()
    assert told["std"] == pytest.approx(ours.item(), rel=0.1)
    assert noise.std().item() == pytest.approx(told["std"], rel=4 / noise.numel() ** 0.5)
    # tables and scores, with the page's coefficients
    fope.cos_coef, fope.sin_coef = torch.tensor(told["cos_coef"]), torch.tensor(told["sin_coef"])
    for pos, found in ((rope, theirs["rope"]), (fope, told)):
        pos.freqs = torch.tensor(found["freqs"])
        cos, sin = (table if table.ndim == 2 else table[H - 1] for table in pos.tables(T))
        agree(cos[positions], found["cos"])
        agree(sin[positions], found["sin"])
        scores = pos.scores(q.expand(1, H, T, -1), k.expand(1, H, T, -1))[0, H - 1, T - 1]
        # the angle between two hands is what attention sees of a distance
        (q1, q2), (k1, k2) = q.chunk(2), k.chunk(2)
        parts = torch.stack((q1 * k1 + q2 * k2, q1 * k2 - q2 * k1)) / math.sqrt(head_dim)
        agree(scores[positions], (torch.tensor(found["between"]) * parts).sum((1, 2)).tolist())


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1, 4, 16])
def test_its_yarn_is_that_of_baselines(page, factor):
    freqs = RoPE(head_dim=64, n_head=1, train_len=512, theta=1e4).freqs
    found = page.execute_script(
        "const shape = {trainLen: 512, headDim: 64, theta: 1e4};"
        f"return [yarn, slowDown].map((f) => Array.from(f(ropeFreqs(64, 1e4), {factor}, shape)))"
    )
    ours = yarn(freqs, factor, original_len=512, head_dim=64), slow_down(freqs, factor, 512)
    torch.testing.assert_close(torch.stack(ours), torch.tensor(found), rtol=1e-5, atol=0)


ADDRESSES = ["", "trainLen=64&theta=10", "trainLen=2048&floor=0", "show=slow&text=1"]


@pytest.mark.slow
def test_it_is_whole_whatever_its_address_says(page):
    for address in ADDRESSES:
        page.get("about:blank")
        page.get(f"{PAGE.as_uri()}#{address}")
        empty = page.execute_script(
            "return [...document.querySelectorAll('main svg[id], main .says, main table')]"
            ".filter((e) => !e.innerHTML || /NaN|undefined/.test(e.outerHTML)).map((e) => e.id)"
        )
        assert empty == [] and page.get_log("browser") == [], address


@pytest.mark.slow
def test_every_control_changes_what_is_drawn(page):
    from selenium.webdriver import Keys

    drawn = "drawAll(); return document.querySelector('main').innerHTML"
    controls = ".control input, #position, main button:not(#show_rope)"  # which is shown already
    for control in page.find_elements("css selector", controls):
        page.execute_script("set(START)")
        before = page.execute_script(drawn)
        key = {"checkbox": Keys.SPACE, "range": Keys.ARROW_LEFT}
        control.send_keys(key.get(control.get_attribute("type"), Keys.ENTER))
        time.sleep(0.5)
        page.execute_script("play.going = false")
        assert page.execute_script(drawn) != before, control.get_attribute("id")


@pytest.mark.slow
def test_a_letter_is_as_red_as_its_loss(page):
    strip = json.loads((ROOT / "results" / "mechanism" / "strip.json").read_text())
    for number, passage in enumerate(strip["passages"]):
        text = page.execute_script(f"set({{text: {number}}}); return byId('strip').textContent")
        assert text == passage["text"].replace("\n", "¶")
        for name in ("rope", "slow", "fope"):
            page.execute_script(f"set({{show: '{name}', position: 1500}})")
            colours = page.execute_script(
                "return [...byId('strip').children].map((e) => e.style.backgroundColor)"
            )
            alphas = [float((re.findall(r"0\.\d+", colour) or [0])[-1]) for colour in colours]
            losses = passage["losses"][name]
            for place in (40, 400, 700, 1100, 1500):
                loss = sum(losses[place - 32 : place + 33]) / 65
                expected = min(0.8, max(0, (loss - 1.2) / 1.5))
                assert alphas[place] == pytest.approx(expected, abs=0.03)
            assert not any(colours[1501:])  # is not read yet
            said = page.execute_script("return byId('says0').textContent")
            found = float(re.search(r"bytes: ([\d.]+) nats", said)[1])
            assert found == pytest.approx(sum(losses[1373:1501]) / 128, abs=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1280])
def test_it_fits_the_window(page, width):
    size = dict(width=width, height=740, deviceScaleFactor=1, mobile=width < 500)
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    wide = page.execute_script("drawAll(); return document.documentElement.scrollWidth")
    slider = page.execute_script("return byId('position').offsetWidth")
    page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert wide <= width and slider > 90
