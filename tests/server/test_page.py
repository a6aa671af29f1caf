"""The page in a headless chromium: a conversation with the demo model, scripted answers, the keyboard, what is read."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from threading import Event
from typing import Any

import pytest

from dsa_engine import LLM, SamplingParams
from dsa_engine.server.app import PAGE
from servers.scripted_server import Scripted, scripted_server

playwright = pytest.importorskip("playwright.sync_api", reason='playwright is not installed: pip install ".[browser]"')
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed: apt-get install chromium")

FACTS = {4821: 97, 7634: 48, 1155: 23}
DOCUMENT = "\n".join([f"key {key} is {value}" for key, value in FACTS.items()] + ["def main():", "    return 0"] * 10)


@pytest.fixture(scope="module")
def scripted() -> Iterator[Scripted]:
    with scripted_server(PAGE) as server:
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as api:
        chromium = api.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Any]]:
    """``visit(address, **options)`` opens the page. It may ask no other host, and no script may fail."""
    contexts, wrong = [], []

    def open_page(url: str, **options: Any) -> Any:
        contexts.append(browser.new_context(**options))
        page = contexts[-1].new_page()
        page.set_default_timeout(20_000)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("dialog", lambda dialog: dialog.accept())  # another document is another conversation
        page.on("request", lambda request: request.url.startswith(url) or wrong.append(request.url))
        # A failed response is on the console whatever the page does with it.
        page.on("console", lambda m: m.text.startswith("Failed to load resource") or wrong.append(m.text))
        page.goto(url)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert wrong == []


def piece(reasoning: str | None = None, **delta: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta | ({"reasoning_content": reasoning} if reasoning else {})}]}


def ask(page: Any, text: str) -> Any:
    """Types a question and sends it; returns the turn."""
    turns = page.locator(".turn").count()
    page.get_by_label("Your question").fill(text)
    page.keyboard.press("Enter")
    return page.locator(".turn").nth(turns)


def finished(page: Any) -> None:
    page.locator("#send").wait_for()


def drop(page: Any, name: str, content: bytes) -> None:
    """Drops a file on the page as a pointer does."""
    transfer = page.evaluate_handle(
        """([name, bytes]) => {
            const transfer = new DataTransfer();
            transfer.items.add(new File([new Uint8Array(bytes)], name));
            return transfer;
        }""",
        [name, list(content)],
    )
    for event in ("dragenter", "dragover", "drop"):
        page.dispatch_event("#conversation", event, {"dataTransfer": transfer})


@pytest.fixture
def demo() -> Iterator[LLM]:
    with LLM("demo", device="cpu", max_model_len=2048, cache_memory="32MiB", progress=False) as llm:
        yield llm


def test_a_conversation_about_a_document(demo: LLM, visit: Callable[..., Any], serve: Callable[..., Any]) -> None:
    """With the trained demo model, behind an API key."""
    server = serve(demo, api_key="secret", served_model_name=["demo"])
    assert server.get("/page/page.js").headers["cache-control"] == "no-cache"
    page = visit(f"http://127.0.0.1:{server.port}/")
    bodies: list[Any] = []
    page.on("request", lambda r: r.url.endswith("/completions") and bodies.append(r.post_data_json))
    page.get_by_text("needs an API key").wait_for()
    turn = ask(page, "What is key 4821?")
    turn.get_by_text("This server asks for an API key: enter it in Settings.").wait_for()
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("API key").fill("secret")
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Max tokens").fill("6")
    page.keyboard.press("Enter")
    page.get_by_text("ready").wait_for()

    drop(page, "facts.txt", DOCUMENT.encode())
    page.get_by_role("heading", name="facts.txt").wait_for()
    page.locator("#document-counts", has_text=f"{len(DOCUMENT):,} characters, ").filter(has_text="tokens").wait_for()
    assert page.locator("#document-text").inner_text().startswith("key 4821 is 97\nkey 7634")

    for key in (7634, 1155):
        turn = ask(page, f"What is key {key}?")
        finished(page)
        assert f"key {key} is {FACTS[key]}" in turn.locator(".answer > .text").inner_text()
    figures = turn.locator(".figures").inner_text().split("\n")
    assert figures[::2] == ["TTFT", "Speed", "Answer", "Cached"]
    cached, prompt = (int(word.replace(",", "")) for word in figures[-1].split() if word[0].isdigit())
    assert 64 <= cached < prompt  # from the first question
    first, second = (body["messages"] for body in bodies)
    assert second[: len(first)] == first and first[0]["content"].count(DOCUMENT) == 1
    assert [message["role"] for message in second] == ["user", "assistant", "user"]
    assert bodies[0]["temperature"] == 0 and bodies[0]["max_tokens"] == 6


def test_a_click_on_a_word_shows_what_it_looked_at(
    demo: LLM, visit: Callable[..., Any], serve: Callable[..., Any]
) -> None:
    """The fact that was asked for lights up; the numbers are those of the Python API for the same tokens."""
    facts = {1000 + 7 * number: (37 * number) % 100 for number in range(90)}
    document = "".join(f"key {key} is {value:02}\n" for key, value in facts.items())
    server = serve(demo, served_model_name=["demo"])
    page = visit(f"http://127.0.0.1:{server.port}/")
    answers: list[Any] = []
    page.on("response", lambda r: r.url.endswith("/v1/completions") and answers.append(r))
    drop(page, "facts.txt", document.encode())
    turn = ask(page, "What is key 1140?")
    finished(page)
    words = turn.locator(".answer > .text p")
    assert words.inner_text() == "key 1140 is 40"
    box = words.evaluate("""(p) => {
        const range = document.createRange();
        range.setStart(p.firstChild, 12);
        range.setEnd(p.firstChild, 14);
        const { x, y, width, height } = range.getBoundingClientRect();
        return [x + width / 2, y + height / 2];
    }""")
    page.mouse.click(*box)
    said = page.locator("#lens p", has_text="It selected 256 of ")
    said.wait_for()
    assert page.locator("#lens strong").inner_text() == "40"
    assert page.evaluate("() => `${[...CSS.highlights.get('look-word')].length}`") == "1"
    fact = page.evaluate("""() => {
        const [range] = CSS.highlights.get("look-5");
        range.setStart(range.startContainer, 0);
        return range.toString();
    }""")
    assert fact.endswith("key 1140 is 40")
    asked = answers[0].request.post_data_json
    (choice,) = answers[0].json()["choices"]
    params = SamplingParams(temperature=0, max_tokens=1, selection=1)
    ((prompt,),) = (asked["prompt"],)
    (output,) = demo.generate([prompt], params, use_tqdm=False)
    assert output.selection is not None and choice["text"].strip() == "40"
    assert choice["selection"]["positions"] == output.selection.positions.tolist()
    page.get_by_label("Next word").click()  # from the last one to the first
    page.locator("#lens strong", has_text="key").wait_for()
    page.keyboard.press("Escape")
    assert page.locator("#lens").is_hidden() and page.evaluate("() => CSS.highlights.size") == 0


def test_thoughts_text_and_errors_as_they_come(visit: Callable[..., Any], scripted: Scripted) -> None:
    page = visit(scripted.url)
    more = Event()

    def answer(write: Callable[[Any], Any]) -> None:
        write(piece(role="assistant", content=""))
        write(piece("It is <i>easy</i>."))
        more.wait(20)
        for part in (
            "Take **ca",
            "re** of `<b>` & <img src=x onerror=alert(1)>\n\n- one\n",
            "- two\n\n```\na  <b>\n",
            "```\n",
        ):
            write(piece(content=part))
        write({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
        write({"choices": [], "usage": {"prompt_tokens": 70, "completion_tokens": 9}})
        write({"error": {"message": "A rank has failed."}})

    scripted.script.extend([(429, {"error": {"message": "full"}}), answer, lambda write: write(piece(content="Half"))])
    turn = ask(page, "Is there room?")
    turn.get_by_text("The server has no room for another request now. Try again in 7 seconds.").wait_for()
    turn.get_by_role("button", name="Try again").click()
    turn.get_by_text("Thinking…").wait_for()
    thought = turn.get_by_text("It is <i>easy</i>.")
    thought.wait_for(state="attached")
    assert not thought.is_visible()
    turn.get_by_text("Thoughts").click()
    assert thought.is_visible()
    more.set()
    turn.get_by_text("A rank has failed.").wait_for()
    text = turn.locator(".answer > .text")
    assert " ".join(text.inner_text().split()) == "Take care of <b> & <img src=x onerror=alert(1)> one two a <b>"
    assert text.locator("strong").inner_text() == "care" and text.locator("li").count() == 2
    assert text.locator("pre").inner_text() == "a  <b>" and text.locator("img, b").count() == 0
    assert "Ended at the limit of tokens." in turn.inner_text() and "0 of 70 prompt tokens" in turn.inner_text()

    turn = ask(page, "And now?")
    turn.get_by_text("The connection ended before the answer was complete.").wait_for()
    assert "Half" in turn.inner_text()


# A text that is cut anywhere shows as the whole text does.
CUT = """async (text) => {
    const { Prose } = await import("./page/prose.js");
    const shown = (...parts) => {
        const element = document.createElement("div");
        const prose = new Prose(element);
        for (const part of parts) prose.push(part);
        return element.innerHTML;
    };
    const whole = shown(text);
    const differ = [...text].flatMap((_, i) => shown(text.slice(0, i), text.slice(i)) === whole ? [] : [i]);
    return [whole, shown(...text) === whole, differ];
}"""
MARKDOWN = """# A *title*
Text with `a <code>` and **strong**
- one
  goes on
    1. inner

```py
# no title
```
> quoted
***
| a | b |
|---|---|
| 1 | <2> |
"""
SHOWN = (
    "<h4>A <em>title</em></h4><p>Text with <code>a &lt;code&gt;</code> and <strong>strong</strong></p>"
    '<ul><li>one\ngoes on<ol start="1"><li>inner</li></ol></li></ul>'
    '<pre class="scroller" tabindex="0"><code># no title</code></pre>'
    "<blockquote><p>quoted</p></blockquote><hr>"
    '<div class="scroller" tabindex="0"><table><thead><tr><th>a</th><th>b</th></tr></thead>'
    "<tbody><tr><td>1</td><td>&lt;2&gt;</td></tr></tbody></table></div>"
)


def test_markdown_cut_anywhere(visit: Callable[..., Any], scripted: Scripted) -> None:
    assert visit(scripted.url).evaluate(CUT, MARKDOWN) == [SHOWN, True, []]


def test_stop_ends_the_request(visit: Callable[..., Any], scripted: Scripted) -> None:
    page = visit(scripted.url)

    def endless(write: Callable[[Any], Any]) -> None:
        while not scripted.disconnected.wait(0.01):
            write(piece(content="more and "))

    for stop in (lambda: page.keyboard.press("Escape"), lambda: page.get_by_role("button", name="Stop").click()):
        scripted.disconnected.clear()
        scripted.script.extend([endless])
        turn = ask(page, "Go on")
        turn.get_by_text("more and more").wait_for()
        stop()
        turn.get_by_text("Stopped.").wait_for()
        assert scripted.disconnected.wait(20)
        assert page.evaluate("document.activeElement.id") == "question"
    assert "Stopped." in page.get_by_role("status").inner_text()
    page.get_by_role("button", name="New conversation").click()
    assert page.locator(".turn").count() == 0


NO_DOCUMENTS = {
    "picture.png": (b"\x89PNG\x00\xff", "“picture.png” is not a text file in UTF-8."),
    "empty.txt": (b" \n", "“empty.txt” has no text in it."),
}


def test_documents(visit: Callable[..., Any], scripted: Scripted) -> None:
    """What is no text is refused. The whole of a million characters is on the page, in pieces of which the browser lays
    out those in view."""
    page = visit(scripted.url)
    for name, (content, words) in NO_DOCUMENTS.items():
        page.locator("#file").set_input_files({"name": name, "mimeType": "", "buffer": content})
        page.get_by_role("alert").get_by_text(words).wait_for()
        assert page.get_by_role("button", name="Choose a file").is_visible()
    drop_text = """(text) => {
        const dataTransfer = new DataTransfer();
        dataTransfer.items.add(new File([text], "long.txt"));
        document.body.dispatchEvent(new DragEvent("drop", { dataTransfer, bubbles: true, cancelable: true }));
    }"""
    page.evaluate("() => { window.long = '😀 long line '.repeat(1000) + 'line\\n'.repeat(190000) }")
    page.evaluate("() => { window.long += '.'.repeat(1001000 - long.length) }")  # 1,000 characters are two units each
    page.evaluate(f"({drop_text})(window.long)")
    counts = page.locator("#document-counts", has_text="1,000,000 characters, 300,000 tokens")
    counts.get_by_text("more than the model’s 163,840").wait_for()
    pieces = page.locator("#document-text > div")
    assert page.locator("#document-text").evaluate("element => element.textContent === window.long")
    assert pieces.count() > 200
    assert pieces.last.evaluate("element => getComputedStyle(element).contentVisibility") == "auto"
    page.evaluate(f"({drop_text})(window.long + '!')")
    words = "“long.txt” has 1,000,001 characters; it is too long: at most 1,000,000 characters are possible here."
    page.get_by_role("alert").get_by_text(words).wait_for()


FOCUSED = """() => {
    const { tagName, id } = document.activeElement;
    const { outlineStyle, outlineWidth } = getComputedStyle(document.activeElement);
    return [id || tagName, outlineStyle !== "none" && parseFloat(outlineWidth) >= 2];
}"""


def test_the_keyboard_reaches_everything_in_order(visit: Callable[..., Any], scripted: Scripted) -> None:
    page = visit(scripted.url)
    page.get_by_text("ready").wait_for()
    page.get_by_role("heading", name="dsa_engine").click()  # from the top
    seen: list[str] = []
    while "send" not in seen:
        page.keyboard.press("Tab")
        name, outlined = page.evaluate(FOCUSED)
        assert outlined, name
        seen.append(name)
    assert [name for name in seen if name != "paste"] == ["open-settings", "choose-file", "turns", "question", "send"]
    page.get_by_label("Your question").focus()
    page.keyboard.type("two")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("lines")
    assert page.get_by_label("Your question").input_value() == "two\nlines"
    page.get_by_role("button", name="Settings").focus()
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "temperature"
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.id") == "open-settings"
    page.evaluate("document.activeElement.blur()")
    page.evaluate(
        """() => {
            const clipboardData = new DataTransfer();
            clipboardData.setData("text/plain", "from the clipboard");
            document.body.dispatchEvent(new ClipboardEvent("paste", { clipboardData, bubbles: true }));
        }"""
    )
    page.get_by_role("heading", name="Pasted text").wait_for()


# Every text that is seen, with the contrast of its colour and the background it stands on; see WCAG 2.2, 1.4.3.
CONTRASTS = """() => {
    const channel = (v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
    const parse = (color) => (color.match(/[\\d.]+/g) ?? []).map(Number);
    const luminance = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
    const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    const low = [];
    let count = 0;
    while (texts.nextNode()) {
        const element = texts.currentNode.parentElement;
        if (!texts.currentNode.data.trim() || element.closest(".unseen, :disabled")) continue;
        if (!element.checkVisibility()) continue;
        let under = element;
        while (parse(getComputedStyle(under).backgroundColor)[3] === 0) under = under.parentElement;
        const [one, other] = [getComputedStyle(element).color, getComputedStyle(under).backgroundColor]
            .map((color) => luminance(parse(color)) + 0.05);
        count++;
        if (Math.max(one, other) / Math.min(one, other) < 4.5) low.push(texts.currentNode.data.trim());
    }
    return [count, low];
}"""


def test_what_is_seen_and_read(visit: Callable[..., Any], scripted: Scripted) -> None:
    """Contrast, names for screen readers, and a phone's width, with a document, an answer and an error."""
    page = visit(scripted.url, viewport={"width": 360, "height": 740}, reduced_motion="reduce")
    page.locator("#file").set_input_files({"name": "a" * 80 + ".txt", "mimeType": "", "buffer": b"text"})
    page.get_by_role("button", name="Show").click()
    assert page.get_by_role("group", name="Text of the document").is_visible()
    scripted.script.extend(
        [lambda write: [write(piece("Thought")), write(piece(content="| a |\n|---|\n| 1 |\n\n`code`"))]]
    )
    ask(page, "Why?").get_by_role("button", name="Try again").wait_for()
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        count, low = page.evaluate(CONTRASTS)
        assert count > 15 and low == [], scheme
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    tree = page.locator("body").aria_snapshot()
    for line in (
        '- button "New conversation"',
        '- log "Questions and answers"',
        '- heading "Question 1" [level=3]',
        '- heading "Answer 1" [level=3]',
        '- textbox "Your question"',
        "- status: The connection ended",
        '- region "Conversation"',
    ):
        assert line in tree, tree
    page.get_by_role("button", name="Settings").click()
    count, low = page.evaluate(CONTRASTS)
    assert low == []
    for name in ("Temperature", "Max tokens", "System prompt", "API key"):
        assert page.get_by_label(name).is_visible()
