"""Conversations and settings that the browser keeps, and the calls of tools in them."""

import json
from typing import Any

import pytest

from penstock.engine.text.template import ChatTemplate
from tests.support.chat_samples import QWEN3
from tests.support.fake_engine import FakeEngine
from tests.support.page_browser import MARKS, Page, visit
from tests.support.running_server import Running, running, until

pytestmark = [*MARKS, pytest.mark.slow]
TITLES = "#past-list li > :first-child"
MARKDOWN = "# Bats\n\n- *small*\n  1. `x`\n\n```c\nint x;\n```\n\n|a|b|\n|-|-|\n|1|2|\n\n> said\n\n---\n**end**"
FULL = "for (let size = 1 << 20; size; size >>= 1) try { for (let i = 0; ; i++) localStorage.setItem(`${size} ${i}`, 'x'.repeat(size)); } catch {}"
DENIED = """for (const name of ["localStorage", "sessionStorage"]) {
  Object.defineProperty(window, name, { get() { throw new DOMException("denied", "SecurityError"); } });
}"""
NOTE_THE_OPENING = """document.getElementById("settings").addEventListener("toggle", ({ newState }) => {
  if (newState === "open") window.isOpened = true;
})"""
TOOLS = [{"name": name, "parameters": {"type": "object"}} for name in ("weather", "time")]


def titles(page: Page) -> list[str]:
    return list(page.locator(TITLES).all_inner_texts())


def kept(page: Page) -> list[dict[str, Any]]:
    keys = "Object.keys(localStorage).filter(k => k.startsWith('penstock-chat:'))"
    return list(page.evaluate(f"{keys}.map(k => JSON.parse(localStorage[k]))"))


def test_a_reload_shows_all_conversations_as_they_were(browser: Any) -> None:
    engine = FakeEngine()
    engine.reply = MARKDOWN
    with running(engine) as server, visit(browser, server.url, may_complain=True) as page:
        page.ask("About bats")
        shown, figures = page.inner_html("#talk > li:last-child .text"), page.foot()
        page.click("#new")
        page.ask("About cats")
        page.reload()
        assert titles(page) == ["About cats", "About bats"] and page.turns()[0] == "About cats"
        page.click(f"{TITLES} >> text=bats")
        assert page.turns()[0] == "About bats" and page.foot() == figures
        assert page.inner_html("#talk > li:last-child .text") == shown
        assert page.get_attribute(f"{TITLES} >> text=bats", "aria-current") == "true"
        page.ask("More")
        assert titles(page) == ["About bats", "About cats"]
        assert sorted(len(talk["turns"]) for talk in kept(page)) == [2, 4]
        other = page.context.new_page()
        other.goto(server.url)
        assert other.is_visible("#empty") and titles(other) == ["About bats", "About cats"], "a new tab is empty"
        engine.delay_s = 0.02
        page.say("Much more")
        page.begun()
        page.reload()
        assert page.turns()[-2] == "Much more" and page.turns()[-1].startswith("Bats")
        assert "left unfinished" in page.foot() and page.is_visible("#talk > li:last-child [data-does=again]")
        until(lambda: len(engine.answers) == 0)


def test_conversations_are_deleted_one_by_one_or_together_after_a_question(browser: Any, slow: Running) -> None:
    with visit(browser, slow.url) as page:
        page.answer_texts("1", "2", "3")
        for text in ("one", "two", "three"):
            page.click("#new")
            page.ask(text)
        page.once("dialog", lambda dialog: dialog.dismiss())
        page.click("[aria-label='Delete two']")
        assert titles(page) == ["three", "two", "one"]
        page.on("dialog", lambda dialog: dialog.accept())
        page.click("[aria-label='Delete two']")
        assert titles(page) == ["three", "one"] and page.turns()[0] == "three"
        (gone,) = [talk["id"] for talk in kept(page) if talk["turns"][0]["content"] == "one"]
        page.evaluate("(id) => localStorage.removeItem(`penstock-chat:${id}`)", gone)  # as another tab does
        page.click("[aria-label='Delete one']")
        assert titles(page) == ["three"]
        page.click("#past-clear")
        assert titles(page) == [] and kept(page) == [] and page.is_hidden("#past-clear") and page.is_visible("#empty")


def test_the_newest_fifty_readable_conversations_are_kept_if_they_fit(browser: Any, slow: Running) -> None:
    broken = ["", "null", "[]", "{", '{"id": "x4"}', '{"id": "x5", "turns": [{"role": 1}]}', '{"turns": [null]}']
    fill = """([count, size]) => { for (let i = 0; i < count; i++) {
      const talk = { id: `t${i}`, at: i + 1, turns: [{ role: "user", content: `talk ${i} ` + "x".repeat(size) }] };
      localStorage.setItem(`penstock-chat:t${i}`, JSON.stringify(talk));
    } }"""
    for count, size, left in ((60, 10, 50), (10, 300_000, 7)):
        with visit(browser, slow.url) as page:
            page.evaluate(fill, [count, size])
            page.answer_texts("done")
            page.ask("abc")
            assert len(kept(page)) == left and titles(page)[1].startswith(f"talk {count - 1} ")
            store = "(all) => all.forEach((text, i) => localStorage.setItem(`penstock-chat:x${i}`, text))"
            page.evaluate(store, broken)
            page.evaluate("localStorage.setItem('penstock-settings', '{broken')")
            page.reload()
            assert len(titles(page)) == left and titles(page)[0] == "abc"


def test_the_chat_goes_on_with_a_full_storage_and_a_note(browser: Any, slow: Running) -> None:
    with visit(browser, slow.url) as page:
        page.answer_texts("one", "x" * 4000, "three")
        page.ask("abc")
        page.evaluate(FULL)
        page.ask("more")
        assert "storage is full" in page.inner_text("#kept-note") and page.is_visible("#kept-note")
        assert [len(talk["turns"]) for talk in kept(page)] == [2]
        free = "Object.keys(localStorage).forEach((key) => key.startsWith('penstock') || localStorage.removeItem(key))"
        page.evaluate(free)
        assert page.ask("again") == "three" and page.inner_text("#kept-note") == ""
        assert [len(talk["turns"]) for talk in kept(page)] == [6]


def test_without_storage_chats_and_key_last_as_long_as_the_page(browser: Any) -> None:
    with running(api_keys=("sk-right",)) as server, visit(browser, "about:blank", may_complain=True) as page:
        page.add_init_script(DENIED)
        page.goto(server.url)
        page.fill("#key-value", "sk-right")
        page.press("#key-value", "Enter")
        page.wait_for_selector("#model option", state="attached")
        page.answer_texts("one", "two")
        assert page.ask("abc") == "one" and "allows no storage" in page.inner_text("#kept-note")
        page.click("#new")
        page.ask("def")
        assert titles(page) == ["def", "abc"]
        page.click(f"{TITLES} >> text=abc")
        assert page.turns() == ["abc", "one"]


def test_reasoning_and_calls_are_folded_and_results_go_back_to_the_model(browser: Any) -> None:
    engine = FakeEngine()
    call = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
    calls = call % ("weather", '{"city": "Ulm"}') + "\n" + call % ("time", "{}")
    engine.reply = f"<think>\nhm **so**\n</think>\n\nI look.\n{calls}"
    template = ChatTemplate(QWEN3)
    with running(engine, template=template) as server, visit(browser, server.url) as page:
        page.set_fields(tools=json.dumps([{"type": "function", "function": tool} for tool in TOOLS]))
        assert page.ask("abc") == "I look."
        folds = page.locator("#talk details:visible")
        assert folds.locator("summary").all_inner_texts() == ["Reasoning", "Call of weather", "Call of time"]
        assert folds.evaluate_all("all => all.map(e => e.open)") == [False] * 3
        contents = folds.locator("> div").evaluate_all("all => all.map(e => e.textContent.trim())")
        assert contents == ["hm **so**", '{"city": "Ulm"}', "{}"]
        assert page.get_attribute("#say", "placeholder") == "Result of weather"
        page.reload()
        page.say("rain")
        assert page.get_attribute("#say", "aria-label") == "Result of time" and len(engine.submitted) == 1
        engine.reply = "It rains."
        assert page.ask("noon") == "It rains." and page.get_attribute("#say", "placeholder") == "Message"
        assert f"{calls}<|im_end|>" in server.prompt and '{"name": "weather", "parameters"' in server.prompt
        results = "<tool_response>\nrain\n</tool_response>\n<tool_response>\nnoon\n</tool_response>"
        assert results in server.prompt


def test_settings_are_kept_and_go_with_the_request(browser: Any, slow: Running) -> None:
    fields = {"temperature": "0.5", "top_p": "0.9", "top_k": "7", "max_tokens": "3", "seed": "11"}
    with visit(browser, slow.url) as page:
        page.set_fields(system="Be brief.", **fields)
        page.reload()
        page.ask("abc")
    prompt, params, _ = slow.engine.submitted[0]
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens, params.seed) == (0.5, 0.9, 7, 3, 11)
    assert params.min_p == 0.0, "an empty field is left out"
    assert bytes(prompt).decode().startswith("system: Be brief.\nuser: abc\n")


def test_an_invalid_setting_has_the_focus_and_the_reason_under_it(browser: Any, slow: Running) -> None:
    with visit(browser, slow.url) as page:
        page.set_fields(temperature="9", tools="{bad", max_tokens="5")
        page.evaluate(NOTE_THE_OPENING)  # after the drawer's own listener, which moves the focus
        page.say("abc")
        page.wait_for("window.isOpened")
        assert page.evaluate("document.activeElement.dataset.field") == "temperature"
        temperature, tools = (page.locator(f"#{name}-problem") for name in ("temperature", "tools"))
        assert temperature.is_visible() and "2" in temperature.inner_text()
        assert tools.inner_text().startswith("This is not a list of tools: ")
        send, drawer = (page.locator(id).bounding_box() for id in ("#send", "#settings"))
        assert send["x"] + send["width"] <= drawer["x"], "the settings do not cover the message box"
        field = page.get_by_role("spinbutton", name="Temperature", exact=True)
        assert field.get_attribute("aria-describedby") == "temperature-problem", "the name of the field is the same"
        assert field.bounding_box()["y"] < temperature.bounding_box()["y"]
        field.fill("1")
        temperature.wait_for(state="detached")
        page.press("#say", "Enter")
        assert page.evaluate("document.activeElement.id") == "tools" and page.locator("#talk li").count() == 0
        page.fill("#tools", "null")
        assert tools.inner_text() == "This is not a list of tools: null is none"
        page.fill("#tools", "[]")
        tools.wait_for(state="detached")
        page.keyboard.press("Escape")
        page.say("abc")
        page.answer()
    assert [params.temperature for _, params, _ in slow.engine.submitted] == [1.0]


def test_code_and_answers_are_copied_as_they_were_written(browser: Any, slow: Running) -> None:
    code = "def f():\n\treturn '<b>'  \n"
    with visit(browser, slow.url) as page:
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        page.answer_texts(f"Look:\n\n```py\n{code}\n```\n")
        page.ask("abc")
        read = "navigator.clipboard.readText()"
        page.click(".code button")
        page.wait_for("document.querySelector('.code button').textContent === 'Copied'")
        assert page.evaluate(read) == code
        # Over plain HTTP there is no such interface, and what is selected is copied.
        page.evaluate("void (navigator.clipboard.writeText = () => Promise.reject(new Error('not allowed')))")
        page.click("#talk .foot >> text=Copy")
        page.wait_for("document.querySelector('#talk .assistant .foot button:last-child').textContent === 'Copied'")
        assert page.evaluate(read) == f"Look:\n\n```py\n{code}\n```\n"
