"""``dsa-engine lens``: the file has the engine's own numbers and nothing from elsewhere; in a browser the fact that was
asked for lights up."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import call, patch

import pytest

from dsa_engine import LLM, SamplingParams
from dsa_engine.cli import main
from dsa_engine.engine.startup import start

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FACTS = {1000 + 7 * number: (37 * number) % 100 for number in range(90)}
# Characters of one, two and four bytes, and a tag that must not end the script.
DOCUMENT = "é 𝄞 </script> & \u2028\n" + "".join(f"key {key} is {value:02}\n" for key, value in FACTS.items())
KEY = 1140
# The shaded texts, strongest first, and the words that can be chosen.
SHADED = """() => [5, 4, 3, 2, 1, 0].flatMap((shade) => [...CSS.highlights.get(`look-${shade}`)].map(String))"""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lens")
    (folder / "facts.txt").write_text(DOCUMENT, encoding="utf-8")
    where = ["--prompt-file", str(folder / "facts.txt"), "--output", str(folder / "lens.html")]
    how = ["--device", "cpu", "--cache-memory", "64MiB", "--max-tokens", "8"]
    with patch.object(start, "progress_bar", wraps=start.progress_bar) as bars:
        main(["lens", "--question", f"What is key {KEY}?", *where, *how])
    assert call(1, "requests", "generating", True) in bars.call_args_list, "a long document takes minutes"
    return folder / "lens.html"


def test_the_file(written: Path) -> None:
    page = written.read_text(encoding="utf-8")
    (data,) = re.findall(r'<script type="application/json" id="recorded">(.*)</script>\n', page)
    read = json.loads(data)
    llm = LLM("demo", device="cpu", cache_memory="64MiB", progress=False)
    messages = [{"role": "user", "content": f"{DOCUMENT.rstrip()}\nWhat is key {KEY}?"}]
    (output,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=8, selection=8), use_tqdm=False)
    assert output.selection is not None and output.text == f"key {KEY} is {FACTS[KEY]}"
    assert read["selection"]["positions"] == output.selection.positions.tolist()  # the prompt is long: there is no -1
    for of_layer, ours in zip(read["selection"]["weights"], output.selection.weights.tolist(), strict=True):
        for row, exact in zip(of_layer, ours, strict=True):
            assert row == pytest.approx(exact, abs=1e-6)
    assert (
        read["text"].encode("utf-16-le")[2 * read["start"] : 2 * read["end"]].decode("utf-16-le") == DOCUMENT.rstrip()
    )
    assert read["text"].endswith(output.text) and len(read["tokens"]) == read["prompt"] + len(output.token_ids) - 1
    assert not re.search(r"https?:|\bsrc=|<link|@import|url\(|\bimport\b", page.replace(data, ""))


def test_what_is_wrong_is_said_before_anything_is_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("a")
    words = ["lens", "--prompt-file", str(tmp_path / "a.txt"), "--question", "?", "--device", "cpu"]
    for more, said in (
        (["--selection", "0"], "--selection must be at least 1, not 0"),
        (["--selection", "300"], "selection must be an integer from 0 to 256, not 300"),
        (["--output", str(tmp_path / "no" / "a.html")], "no"),
    ):
        with pytest.raises(SystemExit):
            main([*words, *more])
        assert said in capsys.readouterr().err


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed: apt-get install chromium")
def test_the_fact_lights_up(written: Path) -> None:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    wrong: list[Any] = []
    with (
        playwright.sync_playwright() as api,
        api.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"]) as one,
    ):
        page = one.new_page()
        page.on("console", lambda message: wrong.append(message.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda request: request.url == written.as_uri() or wrong.append(request.url))
        page.goto(written.as_uri())
        said = page.locator("#lens p", has_text="It selected 256 of ")
        said.wait_for()
        assert page.locator(".answer > .text").inner_text() == f"key {KEY} is {FACTS[KEY]}"
        assert page.locator(".question").inner_text() == f"What is key {KEY}?"
        chosen = page.locator("#lens strong")
        assert chosen.inner_text() == str(FACTS[KEY])  # the first one shown
        strongest = page.evaluate(SHADED)
        assert strongest[0].strip() == str(FACTS[KEY]) and len(strongest) > 200
        before = page.evaluate(
            "() => { const [r] = CSS.highlights.get('look-5'); r.setStart(r.startContainer, 0); return `${r}`; }"
        )
        assert before.endswith(f"key {KEY} is {FACTS[KEY]}")  # the fact itself, not another 72
        assert page.get_by_role("heading", name="facts.txt").is_visible() and page.title() == "facts.txt"
        assert not any(page.locator(f"#{name}").is_visible() for name in ("ask", "server", "remove-document"))
        assert re.search(r"It selected 256 of \d{3} tokens in each layer", said.inner_text())
        page.get_by_label("What is shaded").select_option("recent")
        few = page.evaluate(SHADED)
        assert few[0].strip() == str(FACTS[KEY]) and 0 < len(few) < len(strongest)
        page.get_by_label("Layer").select_option("layer 3 of 3")
        assert page.evaluate(SHADED)[0].strip() == str(FACTS[KEY])
        page.get_by_label("Word before").click()
        page.locator("#lens strong", has_text="is").wait_for()
    assert wrong == []
