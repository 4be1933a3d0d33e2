"""Conversations that the browser keeps: over a reload, and where it keeps nothing."""

import json
from typing import Any

from tests.support.fake_engine import FakeEngine
from tests.support.page_browser import MARKS, Page, streamed, visit
from tests.support.running_server import Running, running, until

pytestmark = MARKS
TITLES = "#past-list li > :first-child"
MARKDOWN = "# Bats\n\n- *small*\n  1. `x`\n\n```c\nint x;\n```\n\n|a|b|\n|-|-|\n|1|2|\n\n> said\n\n---\n**end**"
FULL = "for (let size = 1 << 20; size; size >>= 1) try { for (let i = 0; ; i++) localStorage.setItem(`${size} ${i}`, 'x'.repeat(size)); } catch {}"
DENIED = """for (const name of ["localStorage", "sessionStorage"]) {
  Object.defineProperty(window, name, { get() { throw new DOMException("denied", "SecurityError"); } });
}"""
NOTE_THE_OPENING = """document.getElementById("settings").addEventListener("toggle", ({ newState }) => {
  if (newState === "open") window.isOpened = true;
})"""
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def titles(page: Page) -> list[str]:
    found: list[str] = page.locator(TITLES).all_inner_texts()
    return found


def kept(page: Page) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = page.evaluate(
        "Object.keys(localStorage).filter(k => k.startsWith('penstock-chat:')).map(k => JSON.parse(localStorage[k]))"
    )
    return found


def test_a_reload_keeps_the_conversation_as_it_was_shown_and_the_others_with_it(browser: Any) -> None:
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


def test_conversations_are_deleted_one_by_one_and_all_at_once_when_confirmed(browser: Any, slow: Running) -> None:
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


def test_the_newest_fifty_are_kept_as_far_as_there_is_room_and_what_another_page_left_is_passed_over(
    browser: Any, slow: Running
) -> None:
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
            page.evaluate(
                "(all) => all.forEach((text, i) => localStorage.setItem(`penstock-chat:x${i}`, text))", broken
            )
            page.evaluate("localStorage.setItem('penstock-settings', '{broken')")
            page.reload()
            assert len(titles(page)) == left and titles(page)[0] == "abc"


def test_a_full_storage_is_said_and_the_chat_goes_on(browser: Any, slow: Running) -> None:
    with visit(browser, slow.url) as page:
        page.answer_texts("one", "x" * 4000, "three")
        page.ask("abc")
        page.evaluate(FULL)
        page.ask("more")
        assert "storage is full" in page.inner_text("#kept-note") and page.is_visible("#kept-note")
        assert [len(talk["turns"]) for talk in kept(page)] == [2]
        page.evaluate(
            "Object.keys(localStorage).forEach((key) => key.startsWith('penstock') || localStorage.removeItem(key))"
        )
        assert page.ask("again") == "three" and page.inner_text("#kept-note") == ""
        assert [len(talk["turns"]) for talk in kept(page)] == [6]


def test_a_browser_that_allows_no_storage_has_a_chat_and_a_key_until_the_page_ends(browser: Any) -> None:
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


def test_reasoning_and_calls_are_folded_and_results_go_back_to_the_model(browser: Any, slow: Running) -> None:
    def part(index: int, **fields: Any) -> dict[str, Any]:
        function = {name: fields.pop(name) for name in ("name", "arguments") if name in fields}
        return {"tool_calls": [{"index": index, "function": function, **fields}]}

    calls = streamed(
        *({"reasoning_content": "hm "}, {"reasoning_content": "**so**"}, {"content": "I look."}),
        *(part(0, id="a", type="function", name="weather", arguments=""), part(0, arguments='{"city":')),
        *(part(0, arguments='"Ulm"}'), part(1, id="b", type="function", name="time", arguments="{}")),
        finish="tool_calls",
    )
    with visit(browser, slow.url) as page:
        page.set_fields(tools=json.dumps([WEATHER]))
        asked = page.answer_with(calls, streamed({"content": "It rains."}))
        assert page.ask("abc") == "I look."
        folds = page.locator("#talk details:visible")
        assert folds.locator("summary").all_inner_texts() == ["Reasoning", "Call of weather", "Call of time"]
        assert folds.evaluate_all("all => all.map(e => e.open)") == [False] * 3
        assert folds.locator("> div").evaluate_all("all => all.map(e => e.textContent)") == [
            "hm **so**",
            '{"city":"Ulm"}',
            "{}",
        ]
        assert page.get_attribute("#say", "placeholder") == "Result of weather"
        page.reload()
        page.say("rain")
        assert page.get_attribute("#say", "aria-label") == "Result of time" and len(asked) == 1
        assert page.ask("noon") == "It rains." and page.get_attribute("#say", "placeholder") == "Message"
        assert asked[0]["tools"] == [WEATHER]
        assert [message["role"] for message in asked[1]["messages"]] == ["user", "assistant", "tool", "tool"]
        assert [call["function"] for call in asked[1]["messages"][1]["tool_calls"]] == [
            {"name": "weather", "arguments": '{"city":"Ulm"}'},
            {"name": "time", "arguments": "{}"},
        ]
        assert [message.get("tool_call_id") for message in asked[1]["messages"]] == [None, None, "a", "b"]


def test_the_server_takes_the_calls_and_results_that_the_page_sends(browser: Any) -> None:
    engine = FakeEngine()
    engine.reply = '<tool_call>{"name": "weather", "arguments": {"city": "Ulm"}}</tool_call>'
    with running(engine) as server, visit(browser, server.url) as page:
        page.set_fields(tools=json.dumps([WEATHER]))
        page.say("abc")
        page.wait_for_selector("#talk summary >> text=Call of weather")
        page.answer()
        engine.reply = "It rains."
        page.say("rain")
        page.wait_for("document.querySelector('#talk > li:last-child .text')?.textContent === 'It rains.'")
        assert bytes(engine.submitted[1][0]).decode().endswith("<tool_response>\nrain\n</tool_response>\n>")


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


def test_an_invalid_setting_says_why_in_text_under_it_and_has_the_focus(browser: Any, slow: Running) -> None:
    with visit(browser, slow.url) as page:
        page.set_fields(temperature="9", tools="{bad")
        page.evaluate(NOTE_THE_OPENING)  # after the drawer's own listener, which moves the focus
        page.say("abc")
        page.wait_for("window.isOpened")
        assert page.evaluate("document.activeElement.dataset.field") == "temperature"
        temperature, tools = (page.locator(f"#{name}-problem") for name in ("temperature", "tools"))
        assert temperature.is_visible() and "2" in temperature.inner_text()
        assert tools.inner_text().startswith("This is not a list of tools: ")
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
