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
from statistics import mean

import pytest
import torch
from conftest import ROOT

from fope import FoPE, RoPE, alibi_slopes

PAGE = ROOT / "docs" / "index.html"
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")


def test_it_asks_for_nothing():
    text = PAGE.read_text(encoding="utf-8")
    assert not re.search(r"<link|<img|<iframe|@import|url\((?!#)|src=|fetch\(|import\(", text)
    hosts = re.findall(r"https?://([^/\s`]+)", text)  # of its preview, of links to follow
    assert {".".join(host.split(".")[-2:]) for host in hosts} == {"github.io", "github.com"}


def test_a_link_to_it_shows_a_picture_and_all_name_one_repository():
    preview = dict(re.findall(r'<meta property="(.+)" content="(.+)">', PAGE.read_text("utf-8")))
    owner, name = re.fullmatch(r"https://(.+)\.github\.io/(.+)/", preview["og:url"]).groups()
    assert preview["og:image"] == preview["og:url"] + "card.png" and preview["og:title"]
    assert (PAGE.parent / "card.png").read_bytes()[16:24].hex() == f"{1200:08x}{630:08x}"
    for file in ("README.md", "CITATION.cff", "docs/index.html", "experiments/tour.ipynb"):
        words = (ROOT / file).read_text(encoding="utf-8")
        found = re.findall(r"//([\w-]+)\.github\.io/([\w-]+)", words)
        found += re.findall(r"(?:clone|repository-code:) .*//github\.com/([\w-]+)/([\w-]+)", words)
        assert set(found) <= {(owner, name)}, file


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


SHAPES = [(512, 64, 8, 1e4), (24, 16, 2, 100), (96, 80, 6, 5e5), (256, 128, 1, 10), (64, 8, 3, 9)]
VARIANTS = itertools.product(["released", "paper"], [True, False])
SETTINGS = [
    dict(trainLen=L, headDim=head_dim, nHead=H, theta=theta, variant=variant, floor=floor)
    for (L, head_dim, H, theta), (variant, floor) in itertools.product(SHAPES, VARIANTS)
]

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
    theirs = page.execute_script(READ, setting, positions)
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


DRAW_ALL = "for (const { draw } of VIEWS) draw();"
DRAWN = DRAW_ALL + "return document.querySelector('main').innerHTML + byId('first').innerHTML"


def state(page):
    return page.execute_script("return state")


@pytest.mark.slow
def test_every_control_is_moved_by_keyboard_and_by_mouse(page):
    from selenium.webdriver import ActionChains, Keys
    from selenium.webdriver.support.select import Select

    kinds = "form input, form select, #draw, #play, #position, #choose button"
    page.execute_script("document.getElementById('more').open = true")
    controls = page.find_elements("css selector", kinds)
    reached = set()
    for _ in range(len(controls) + 30):  # and links
        ActionChains(page).send_keys(Keys.TAB).perform()
        reached.add(page.switch_to.active_element.id)
    assert {control.id for control in controls} <= reached
    keys = {"checkbox": Keys.SPACE, "range": Keys.ARROW_LEFT, "select-one": Keys.ARROW_DOWN}
    for control, by_mouse in itertools.product(controls, (False, True)):
        name, kind = control.get_attribute("id"), control.get_attribute("type")
        page.execute_script("Object.assign(state, START, {show: 'cycle'}); update();")
        page.execute_script("arguments[0].scrollIntoView({block: 'center'})", control)
        before, drawn = state(page), page.execute_script(DRAWN)
        if not by_mouse:
            page.execute_script("arguments[0].focus()", control)
            ActionChains(page).send_keys(keys.get(kind, Keys.ENTER)).perform()
        elif kind == "select-one":
            Select(control).select_by_index(1)
        else:  # not the middle of a slider, where its handle may be
            x = -control.size["width"] // 3 if kind == "range" else 0
            ActionChains(page).move_to_element_with_offset(control, x, 0).click().perform()
        if name == "play":
            time.sleep(0.5)
            page.execute_script("play.going = false")
        changed = {key for key, value in state(page).items() if value != before[key]}
        if kind in ("range", "checkbox", "select-one"):
            assert name in changed and changed <= {name, "position", "head", "pair"}, name
        if name != "show_cycle":  # which is shown already
            assert changed and page.execute_script(DRAWN) != drawn, name
    assert page.execute_script("return performance.getEntriesByType('resource').length") == 0


@pytest.mark.slow
@pytest.mark.parametrize("change", [{"headDim": 2}, {"trainLen": 3}, {"trainLen": 6}], ids=str)
def test_an_impossible_setting_says_so_and_can_be_left(page, change):
    alert = "update(); return byId('alert').textContent"
    assert str(*change.values()) in page.execute_script(f"Object.assign(state, {change}); {alert}")
    assert not page.execute_script("state.floor = false;" + alert)


@pytest.mark.slow
def test_it_counts_the_hands_that_point_where_they_never_did(page):
    def beyond(theta):
        freqs = RoPE(head_dim=64, n_head=1, train_len=512, theta=theta).freqs.double()
        angle, last = 1023 * freqs % (2 * math.pi), 511 * freqs
        return (angle - last).where((freqs * 512 < 2 * math.pi) & (angle > last), 0)

    known, slower = (int((beyond(theta) > 0).sum()) for theta in (1e4, 5e5))
    texts = "return ['two', 'says2', 'guess2'].map((id) => byId(id).textContent)"
    first, all_hands, guess = page.execute_script("set({position: 1023});" + DRAW_ALL + texts)
    assert f"{round(math.degrees(beyond(1e4)[22]))}°" in first
    # at this position; of RoPE's 32 hands; of FoPE's; that rest
    assert re.findall(r"[\d,]*\d", all_hands) == ["1,023", str(known), "32", "0", "16"]
    assert slower > known and re.findall(r"\d+", guess)[:3:2] == [str(slower), str(known)]


@pytest.mark.slow
def test_hands_are_put_back_as_it_was_measured(page):
    runs = json.loads((ROOT / "results" / "mechanism" / "wrap.json").read_text())["runs"]
    for how in ("slow, wrapped", "fast, wrapped"):
        shown = f"set({{show: '{how[:4]}', position: 1535}}); return byId('says0').textContent"
        loss, trained = (mean(run["by_position"][of][11] for run in runs) for of in (how, "none"))
        gone = f"{100 * mean(run['removed'][how] for run in runs):.0f}"
        known = [gone, f"{loss:.2f}", f"{math.exp(loss):.1f}", f"{trained:.2f}"]
        assert re.findall(r"[\d.]+\d", page.execute_script(shown)) == known
    at = page.execute_script("return [511, 512, 767, 768, 1500].map((d) => wrapped(d, 512))")
    assert at == [511, 256, 511, 256, 476]  # as the experiment turns them


@pytest.mark.slow
def test_the_address_holds_the_settings(page):
    def at(address):
        page.execute_script(f"location.hash = '{address}'")
        time.sleep(0.1)
        return state(page)

    start = at("")
    # what is no setting is left out, and what is too large is cut
    wrong = "position=1e9&floor=0&theta=7&times=x&seed=-3&constructor=1&variant=toString&show=rope"
    assert at(wrong) == start | {"position": 2047, "floor": False, "seed": 0}
    # a link keeps the position and the embedding that are shown
    at("position=700&show=fope")
    assert at("sigma=1") == start | {"position": 700, "show": "fope", "sigma": 1}
    # every link of the page that sets something sets it
    for link in re.findall(r'href="#([^"]+)"', PAGE.read_text("utf-8").replace("&amp;", "&")):
        found = {key: str(int(x) if isinstance(x, bool) else x) for key, x in at(link).items()}
        assert found.items() >= dict(word.split("=") for word in link.split("&")).items()
        at("")


@pytest.mark.slow
def test_it_plays_once_to_512_and_by_steps_for_less_motion(page):
    page.get(PAGE.as_uri())
    assert state(page)["position"] < 500
    time.sleep(7)
    assert state(page)["position"] == 511
    button = page.find_element("id", "play")
    page.execute_script("set({times: 2, position: 1023})")
    less = {"features": [{"name": "prefers-reduced-motion", "value": "reduce"}]}
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", less)
    for there in (256, 512, 768, 1023):  # from the start again
        button.click()
        assert state(page)["position"] == there


@pytest.mark.slow
@pytest.mark.parametrize("width, kind", [(390, "touch"), (1280, "mouse")])
def test_it_fits_the_window_and_its_slider_is_dragged_on_from_512(page, width, kind):
    from selenium.webdriver.common.actions.action_builder import ActionBuilder
    from selenium.webdriver.common.actions.pointer_input import PointerInput

    size = dict(width=width, height=740, deviceScaleFactor=1, mobile=width < 500)
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    page.execute_script(f"set({{times: 16, position: 8191}}); {DRAW_ALL} set(START)")
    wide = page.execute_script(DRAW_ALL + "return document.documentElement.scrollWidth")
    box = page.execute_script("return byId('position').getBoundingClientRect().toJSON()")
    x, y = box["x"] + box["width"] / 4, box["y"] + box["height"] / 2
    actions = ActionBuilder(page, mouse=PointerInput(kind, kind))
    pointer = actions.pointer_action.move_to_location(x + 4, y).pointer_down()
    pointer.move_to_location(x + box["width"] / 4, y).pointer_up()
    actions.perform()
    page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert wide <= width and 900 < state(page)["position"] < 1100
