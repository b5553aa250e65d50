"""
docs/index.html: its copy of fope.py against fope.py, in a real browser, and the page as it is used.

They need Chromium and its driver (Debian: chromium, chromium-driver) and are skipped without them.
"""

import itertools
import json
import math
import re
import shutil
import time

import matplotlib.image
import pytest
import torch
from conftest import ROOT

from fope import FoPE, RoPE, alibi_slopes
from paper import plot

PAGE = ROOT / "docs" / "index.html"
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")


def test_the_page_is_small_and_asks_for_nothing():
    text = PAGE.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 900 and len(text.encode()) <= 200_000
    assert not re.search(r"<link|<img|<iframe|@import|url\((?!#)|src=|fetch\(|import\(", text)
    # the one address in it is that of links which a reader may follow
    assert re.findall(r"https?://[^/\s`]+", text) == ["https://github.com"]


def test_lines_quoted_are_those_of_fope():
    lines = [line.strip() for line in (ROOT / "fope.py").read_text().splitlines()]
    quotations = re.findall(r"<pre><code>(.*?)</code></pre>", PAGE.read_text(), re.S)
    assert len(quotations) >= 4
    for quotation in quotations:
        quoted = [line.strip().replace("&gt;", ">") for line in quotation.splitlines()]
        starts = range(len(lines))
        assert any(lines[i : i + len(quoted)] == quoted for i in starts), quotation


def test_it_is_published_with_its_picture_by_pinned_actions():
    description = re.search(r'og:image" content="([^"]+)"', PAGE.read_text(encoding="utf-8"))
    image = matplotlib.image.imread(PAGE.parent / description[1])
    assert image.shape[1] == 1200 and image.shape[0] == 630
    workflows = list((ROOT / ".github" / "workflows").glob("*.yml"))
    uses = [line for path in workflows for line in path.read_text().splitlines() if "uses:" in line]
    assert len(workflows) == 2 and len(uses) >= 6
    assert all(re.search(r"@[0-9a-f]{40} # v\d", line) for line in uses)
    assert all("\npermissions:\n" in path.read_text() for path in workflows)


def luminance(colour):
    """Of #rrggbb or #rgb, by WCAG 2."""
    digits = colour[1:] if len(colour) == 7 else "".join(2 * c for c in colour[1:])
    parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    parts = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


def contrast(a, b):
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def test_all_is_seen_in_both_themes_and_without_colours():
    text = PAGE.read_text(encoding="utf-8")
    blocks = re.findall(r":root \{(.*?)\}", text, re.S)
    light, dark = (dict(re.findall(r"--(\w+): (#\w+)", block)) for block in blocks)
    assert light.keys() == dark.keys()
    for name, label in {"alibi": "ALiBi", "rope": "RoPE", "fope": "FoPE", "nope": "NoPE"}.items():
        assert light[name].upper() == plot.STYLES[label][0]
    assert light["floor"].upper() == plot.STYLES["FoPE, CF alone"][0]
    for theme in (light, dark):
        for name in ("line", "nope", "alibi", "rope", "fope", "floor", "new"):
            assert contrast(theme[name], theme["page"]) >= 3, name
            assert contrast(theme[name], theme["panel"]) >= 3, name
        for hand in ("rope", "fope", "floor"):
            assert contrast(theme[hand], theme["seen"]) >= 3, hand
        for ground in ("page", "panel", "seen"):
            assert contrast(theme["ink"], theme[ground]) >= 7


# --- in a browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    selenium = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    if not (CHROMIUM and DRIVER):
        pytest.skip("Chromium and chromedriver are not installed")
    options = selenium.ChromeOptions()
    options.binary_location = CHROMIUM
    profile = tmp_path_factory.mktemp("chromium")
    flags = ["headless", "no-sandbox", "disable-gpu", "no-first-run", "disable-component-update"]
    flags += ["disable-background-networking", "disable-sync", "disable-quic"]
    for flag in [*flags, "window-size=1280,900", f"user-data-dir={profile}"]:
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = selenium.Chrome(options, selenium.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture
def page(browser):
    """The page, just opened. Whatever a test does, the console must stay empty."""
    browser.get(PAGE.as_uri())
    yield browser
    assert browser.get_log("browser") == []


SETTINGS = [
    dict(trainLen=L, headDim=head_dim, nHead=H, theta=theta, variant=variant, floor=floor)
    for (L, head_dim, H, theta), (variant, floor) in itertools.product(
        [
            (128, 64, 4, 1e4),
            (512, 64, 8, 1e4),
            (24, 16, 2, 100),
            (96, 80, 6, 5e5),
            (256, 128, 1, 10),
        ],
        [("released", True), ("released", False), ("paper", True), ("paper", False)],
    )
]

READ = """
const [setting, positions, q, k] = arguments, rope = makeRope(setting), fope = makeFope(setting);
const head = setting.nHead - 1;
const rows = (pos) => positions.map((t) => tablesAt(pos, head, t));
const list = (x) => Array.from(x, (y) => (typeof y === "number" ? y : list(y)));
const of = (pos) => ({
  freqs: list(pos.freqs), cos: rows(pos).map((z) => list(z.cos)),
  sin: rows(pos).map((z) => list(z.sin)),
  scores: rows(pos).map((z) => score(q, k, rows(pos).at(-1), z)),
});
const more = { K: fope.K, own: fope.own, std: fope.std, cos_coef: list(fope.cosCoef),
  sin_coef: list(fope.sinCoef) };
return { rope: of(rope), fope: { ...of(fope), ...more }, slopes: alibiSlopes(setting.nHead) };
"""


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_its_mathematics_is_that_of_fope(page, setting):
    setting = setting | dict(sigma=0.3, series=True, seed=3)
    L, H, head_dim = (setting[key] for key in ("trainLen", "nHead", "headDim"))
    T, generator = 2 * L, torch.Generator().manual_seed(0)
    positions = [0, 1, L // 3, L - 1, L, L + 7, T - 1]
    q, k = torch.randn(2, head_dim, generator=generator)
    theirs = page.execute_script(READ, setting, positions, q.tolist(), k.tolist())
    shape = dict(head_dim=head_dim, n_head=H, train_len=L, theta=setting["theta"])
    fope = FoPE(variant=setting["variant"], floor=setting["floor"], sigma=0.3, **shape)
    rope, told = RoPE(**shape), theirs["fope"]

    def agree(ours, theirs):
        torch.testing.assert_close(ours, torch.tensor(theirs), rtol=1e-5, atol=1e-5)

    # frequencies, floor, where the weights of 1 are, and the size of the noise
    agree(alibi_slopes(H), theirs["slopes"])
    agree(rope.freqs, theirs["rope"]["freqs"])
    agree(fope.freqs, told["freqs"])
    D, K = fope.cos_coef.shape[1:]
    own = [d if d < D else -1 for d in torch.arange(K).mul(-(-fope.n_kept // K)).tolist()]
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
        agree(scores[positions], found["scores"])


DRAW_ALL = "for (const { draw } of VIEWS) draw();"
DRAWN = (
    "return document.querySelector('main').innerHTML + document.querySelector('header').innerHTML"
)


def state(page):
    return json.loads(page.execute_script("return JSON.stringify(state)"))


@pytest.mark.slow
def test_every_control_is_moved_by_keyboard_and_by_mouse(page):
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.support.select import Select

    controls = page.find_elements(
        By.CSS_SELECTOR,
        "form input, form select, .bar button, .bar input[id=position], header button",
    )
    # the way back is there once there is something to go back from
    page.execute_script("document.getElementById('more').open = true; set({seed: 7})")
    # all are reached by the tabulator alone
    reached = set()
    for _ in range(len(controls) + 30):  # and links
        ActionChains(page).send_keys(Keys.TAB).perform()
        reached.add(page.switch_to.active_element.id)
    assert {control.id for control in controls} <= reached
    keys = {"checkbox": Keys.SPACE, "range": Keys.ARROW_LEFT, "select-one": Keys.ARROW_DOWN}
    for control in controls:
        name, kind = control.get_attribute("id"), control.get_attribute("type")
        for by_mouse in (False, True):
            page.execute_script("Object.assign(state, START, {seed: 7}); update();" + DRAW_ALL)
            page.execute_script("arguments[0].scrollIntoView({block: 'center'})", control)
            before, drawn = state(page), page.execute_script(DRAWN)
            if not by_mouse:
                page.execute_script("arguments[0].focus()", control)
                ActionChains(page).send_keys(keys.get(kind, Keys.ENTER)).perform()
            elif kind == "select-one":
                Select(control).select_by_index(1)
            else:  # not the middle of a slider, where its handle may be
                ActionChains(page).move_to_element_with_offset(
                    control, -control.size["width"] // 3 if kind == "range" else 0, 0
                ).click().perform()
            if name == "play":
                time.sleep(0.5)
            after = state(page)
            changed = {key for key in before if before[key] != after[key]}
            if kind in ("range", "checkbox", "select-one"):
                assert name in changed and changed <= {name, "position", "head", "pair"}, name
            else:
                pressed = name == "show_rope"  # which is what it shows already
                assert changed or pressed, control.text
            page.execute_script(DRAW_ALL)
            assert page.execute_script(DRAWN) != drawn or pressed, name
            if name == "play":
                page.execute_script("play.going = false")
                time.sleep(0.1)
    assert page.execute_script("return performance.getEntriesByType('resource').length") == 0


@pytest.mark.slow
@pytest.mark.parametrize("change", [{"headDim": 2}, {"trainLen": 3}, {"trainLen": 6}], ids=str)
def test_an_impossible_setting_says_so_and_can_be_left(page, change):
    page.execute_script("Object.assign(state, arguments[0]); update()", change)
    said = page.execute_script("return document.getElementById('alert').textContent")
    assert said.endswith(".") and str(*change.values()) in said
    page.execute_script("Object.assign(state, {floor: false}); update()")
    assert not page.execute_script("return document.getElementById('alert').textContent")


@pytest.mark.slow
def test_what_it_says_follows_the_position(page):
    says = "return [0, 1, 2, 3, 4].map((n) => document.getElementById(`says${n}`).textContent)"
    move = "Object.assign(state, arguments[0]); update();" + DRAW_ALL + says
    inside, beyond = (page.execute_script(move, {"position": t}) for t in (511, 1023))
    assert "the loss is low" in inside[0] and "the loss rises" in beyond[0]
    assert inside[1].startswith("At position 511, inside the training length, 0 of RoPE's 32 hands")
    assert "0 of FoPE's. 16 of FoPE's stand still" in inside[1]
    # counted and measured here once more
    freqs, turn = RoPE(head_dim=64, n_head=1, train_len=512).freqs.double(), 2 * math.pi
    angle, last = 1023 * freqs % turn, 511 * freqs
    new = (freqs * 512 < turn) & (angle > last)
    off = torch.minimum(angle - last, turn - angle)[new].sort().values * 180 / math.pi
    found = re.search(r"(\d+) \(half of them by more than (\d+)°, at most (\d+)°\) of", beyond[1])
    assert [int(x) for x in found.groups()] == [
        len(off),
        round(off[len(off) // 2].item()),
        round(off[-1].item()),
    ]
    assert "no key is further away" in inside[3] and "get a logit from RoPE" in beyond[3]
    # without floor and series FoPE is RoPE
    same = page.execute_script(move, {"floor": False, "series": False})
    a, b = re.match(r".* training length (\d+) % .* and (\d+) %", same[2]).groups()
    assert a == b != "0" and "as in RoPE" in same[4]


@pytest.mark.slow
def test_the_address_holds_the_settings(page):
    def at(address):
        page.execute_script(f"location.hash = '{address}'")
        time.sleep(0.1)
        return state(page)

    start = at("")
    changed = at("position=1023&floor=0&theta=500000&variant=paper&show=alibi")
    assert {k: v for k, v in changed.items() if v != start[k]} == {
        "position": 1023,
        "floor": False,
        "theta": 500000,
        "variant": "paper",
        "show": "alibi",
    }
    told = page.execute_script("return document.getElementById('told').textContent")
    assert (
        told
        == "Changed: theta 500,000; FoPE as in the paper's equations; floor: slow pairs stop off."
    )
    # what is no setting is left out, and what is too large is cut
    wrong = at(
        "position=1e9&floor=0&theta=7&times=x&seed=-3&constructor=1&variant=toString&show=rope"
    )
    assert wrong == start | {"position": 2047, "floor": False, "seed": 0}
    # a link keeps the position and the embedding that are shown
    at("position=700&show=fope")
    assert at("sigma=1") == start | {"position": 700, "show": "fope", "sigma": 1}
    # every link of the page that sets something sets it
    links = re.findall(r'href="#([^"]+)"', PAGE.read_text(encoding="utf-8"))
    assert len(links) >= 8
    for link in links:
        asked = dict(word.split("=") for word in link.replace("&amp;", "&").split("&"))
        found = at(link.replace("&amp;", "&"))
        assert {
            k: str(int(found[k]) if isinstance(found[k], bool) else found[k]) for k in asked
        } == asked
        at("")


@pytest.mark.slow
def test_play_goes_to_the_end_by_steps_for_who_asked_for_less_motion(page):
    button = page.find_element("id", "play")
    page.execute_script("set({times: 2, position: 1000})")
    button.click()
    time.sleep(1)
    assert state(page)["position"] == 1023 and button.text == "▶"
    button.click()  # from the start again
    time.sleep(0.5)
    button.click()
    stopped = state(page)["position"]
    time.sleep(0.3)
    assert 0 < state(page)["position"] == stopped < 1023
    less = {"features": [{"name": "prefers-reduced-motion", "value": "reduce"}]}
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", less)
    page.execute_script("set({position: 0})")
    for there in (256, 512, 768, 1023, 256):
        button.click()
        assert state(page)["position"] == there
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


@pytest.mark.slow
@pytest.mark.parametrize("width", [360, 1280, 1920])
def test_nothing_is_wider_than_the_window(page, width):
    size = dict(width=width, height=740, deviceScaleFactor=1, mobile=width < 500)
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    page.get(PAGE.as_uri())
    assert page.execute_script("return document.documentElement.scrollWidth") <= width
    curves = DRAW_ALL + "return document.querySelectorAll('svg path').length"
    assert page.execute_script(curves) > 200
    radius = "return +document.querySelector('#clocks circle').getAttribute('r')"
    assert page.execute_script(radius) >= 10
    # the first screen is seen at once
    bar = "return document.querySelector('.bar').getBoundingClientRect().top"
    seen = "return document.getElementById('loss').getBoundingClientRect().bottom"
    assert page.execute_script(seen) < page.execute_script(bar)
    page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
