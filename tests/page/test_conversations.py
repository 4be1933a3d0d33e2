"""Conversations that the browser keeps: over a reload, and where it keeps nothing."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.fake_engine import FakeEngine
from tests.support.page_browser import (
    MARKS,
    answer,
    answer_with,
    begun,
    foot,
    say,
    set_fields,
    streamed,
    turns,
    visit,
    wait_for,
)
from tests.support.running_server import Running, running, until

pytestmark = MARKS
TITLES = "#past-list li > :first-child"
MARKDOWN = "# Bats\n\n- *small*\n  1. `x`\n\n```c\nint x;\n```\n\n|a|b|\n|-|-|\n|1|2|\n\n> said\n\n---\n**end**"
FULL = "for (let size = 1 << 20; size; size >>= 1) try { for (let i = 0; ; i++) localStorage.setItem(`${size} ${i}`, 'x'.repeat(size)); } catch {}"
DENIED = """for (const name of ["localStorage", "sessionStorage"]) {
  Object.defineProperty(window, name, { get() { throw new DOMException("denied", "SecurityError"); } });
}"""
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


@pytest.fixture
def server() -> Iterator[Running]:
    with running(FakeEngine(delay_s=0.02)) as server:
        yield server


def reply(page: Any, *texts: str) -> list[dict[str, Any]]:
    return answer_with(page, *(streamed({"content": text}) for text in texts))


def titles(page: Any) -> list[str]:
    found: list[str] = page.locator(TITLES).all_inner_texts()
    return found


def kept(page: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = page.evaluate(
        "Object.keys(localStorage).filter(k => k.startsWith('penstock-chat:')).map(k => JSON.parse(localStorage[k]))"
    )
    return found


def test_a_reload_keeps_the_conversation_as_it_was_shown_and_the_others_with_it(browser: Any) -> None:
    engine = FakeEngine()
    engine.reply = MARKDOWN
    with running(engine) as server, visit(browser, server.url) as page:
        say(page, "About bats")
        answer(page)
        shown, figures = page.inner_html("#talk > li:last-child .text"), foot(page)
        page.click("#new")
        say(page, "About cats")
        answer(page)
        page.reload()
        assert titles(page) == ["About cats", "About bats"] and turns(page)[0] == "About cats"
        page.click(f"{TITLES} >> text=bats")
        assert turns(page)[0] == "About bats" and foot(page) == figures
        assert page.inner_html("#talk > li:last-child .text") == shown
        assert page.get_attribute(f"{TITLES} >> text=bats", "aria-current") == "true"
        say(page, "More")
        answer(page)
        assert titles(page) == ["About bats", "About cats"] and sorted(len(talk["turns"]) for talk in kept(page)) == [
            2,
            4,
        ]


def test_a_new_tab_starts_a_conversation_of_its_own(browser: Any, server: Running) -> None:
    with visit(browser, server.url) as page:
        reply(page, "one")
        say(page, "abc")
        answer(page)
        other = page.context.new_page()
        other.goto(server.url)
        assert other.is_visible("#empty") and titles(other) == ["abc"]


def test_a_reload_in_the_middle_of_an_answer_keeps_what_had_come(browser: Any, server: Running) -> None:
    with visit(browser, server.url, may_complain=True) as page:
        say(page, "abc")
        begun(page)
        page.reload()
        assert turns(page)[0] == "abc" and turns(page)[1].startswith("user") and "left unfinished" in foot(page)
        until(lambda: server.engine.num_open == 0)
        assert page.is_visible("[data-does=again]")


def test_conversations_are_deleted_one_by_one_and_all_at_once_when_confirmed(browser: Any, server: Running) -> None:
    with visit(browser, server.url) as page:
        reply(page, "1", "2", "3")
        for text in ("one", "two", "three"):
            page.click("#new")
            say(page, text)
            answer(page)
        page.once("dialog", lambda dialog: dialog.dismiss())
        page.click("[aria-label='Delete two']")
        assert titles(page) == ["three", "two", "one"]
        page.on("dialog", lambda dialog: dialog.accept())
        page.click("[aria-label='Delete two']")
        assert titles(page) == ["three", "one"] and turns(page)[0] == "three"
        page.click("[aria-label='Delete three']")
        assert titles(page) == ["one"] and page.is_visible("#empty")
        page.click("#past-clear")
        assert titles(page) == [] and kept(page) == [] and page.is_hidden("#past-clear")


def test_the_newest_fifty_are_kept_and_no_more_text_than_there_is_room_for(browser: Any, server: Running) -> None:
    fill = """([count, size]) => { for (let i = 0; i < count; i++) {
      const talk = { id: `t${i}`, at: i + 1, turns: [{ role: "user", content: `talk ${i} ` + "x".repeat(size) }] };
      localStorage.setItem(`penstock-chat:t${i}`, JSON.stringify(talk));
    } }"""
    for count, size, left in ((60, 10, 50), (10, 300_000, 7)):
        with visit(browser, server.url) as page:
            page.evaluate(fill, [count, size])
            reply(page, "done")
            say(page, "abc")
            answer(page)
            assert len(kept(page)) == left and titles(page)[1].startswith(f"talk {count - 1} ")


def test_what_another_page_left_under_these_keys_is_passed_over(browser: Any, server: Running) -> None:
    broken = [
        "",
        "null",
        "[]",
        "{",
        '{"id": "x4"}',
        '{"id": "x5", "turns": [{"role": 1}]}',
        '{"id": "x6", "turns": [null]}',
    ]
    with visit(browser, server.url) as page:
        page.evaluate("(all) => all.forEach((text, i) => localStorage.setItem(`penstock-chat:x${i}`, text))", broken)
        page.evaluate("localStorage.setItem('penstock-settings', '{broken')")
        page.reload()
        reply(page, "done")
        say(page, "abc")
        assert answer(page) == "done" and titles(page) == ["abc"]


def test_a_full_storage_is_said_and_the_chat_goes_on(browser: Any, server: Running) -> None:
    with visit(browser, server.url) as page:
        reply(page, "one", "x" * 4000, "three")
        say(page, "abc")
        answer(page)
        page.evaluate(FULL)
        say(page, "more")
        answer(page)
        assert "storage is full" in page.inner_text("#kept-note") and page.is_visible("#kept-note")
        assert [len(talk["turns"]) for talk in kept(page)] == [2]
        page.evaluate(
            "Object.keys(localStorage).forEach((key) => key.startsWith('penstock') || localStorage.removeItem(key))"
        )
        say(page, "again")
        assert answer(page) == "three" and page.inner_text("#kept-note") == ""
        assert [len(talk["turns"]) for talk in kept(page)] == [6]


def test_a_browser_that_allows_no_storage_has_a_chat_and_a_key_until_the_page_ends(browser: Any) -> None:
    with running(api_keys=("sk-right",)) as server, visit(browser, "about:blank", may_complain=True) as page:
        page.add_init_script(DENIED)
        page.goto(server.url)
        page.fill("#key-value", "sk-right")
        page.press("#key-value", "Enter")
        page.wait_for_selector("#model option", state="attached")
        reply(page, "one", "two")
        say(page, "abc")
        assert answer(page) == "one" and "allows no storage" in page.inner_text("#kept-note")
        page.click("#new")
        say(page, "def")
        answer(page)
        assert titles(page) == ["def", "abc"]
        page.click(f"{TITLES} >> text=abc")
        assert turns(page) == ["abc", "one"]


def test_a_question_waits_for_the_key_and_is_kept_when_none_is_given(browser: Any) -> None:
    with running(api_keys=("sk-right",)) as server, visit(browser, server.url, may_complain=True) as page:
        page.wait_for_selector("#key[open]")
        page.click("#key-cancel")
        say(page, "abc")
        page.wait_for_selector("#key[open]")
        page.click("#key-cancel")
        answer(page)
        assert "needs an API key" in page.inner_text("#talk .error")
        page.click("[data-does=again]")
        page.fill("#key-value", "sk-right")
        page.press("#key-value", "Enter")
        wait_for(page, "document.querySelector('#talk .error') === null")
        assert "user: abc" in answer(page) and turns(page)[0] == "abc"


def test_reasoning_and_calls_are_folded_and_results_go_back_to_the_model(browser: Any, server: Running) -> None:
    def part(index: int, **fields: Any) -> dict[str, Any]:
        function = {name: fields.pop(name) for name in ("name", "arguments") if name in fields}
        return {"tool_calls": [{"index": index, "function": function, **fields}]}

    calls = streamed(
        *({"reasoning_content": "hm "}, {"reasoning_content": "**so**"}, {"content": "I look."}),
        *(part(0, id="a", type="function", name="weather", arguments=""), part(0, arguments='{"city":')),
        *(part(0, arguments='"Ulm"}'), part(1, id="b", type="function", name="time", arguments="{}")),
        finish="tool_calls",
    )
    with visit(browser, server.url) as page:
        set_fields(page, tools=json.dumps([WEATHER]))
        asked = answer_with(page, calls, streamed({"content": "It rains."}))
        say(page, "abc")
        assert answer(page) == "I look."
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
        say(page, "rain")
        assert page.get_attribute("#say", "aria-label") == "Result of time" and len(asked) == 1
        say(page, "noon")
        assert answer(page) == "It rains." and page.get_attribute("#say", "placeholder") == "Message"
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
        set_fields(page, tools=json.dumps([WEATHER]))
        say(page, "abc")
        page.wait_for_selector("#talk summary >> text=Call of weather")
        answer(page)
        engine.reply = "It rains."
        say(page, "rain")
        wait_for(page, "document.querySelector('#talk > li:last-child .text')?.textContent === 'It rains.'")
        assert bytes(engine.submitted[1][0]).decode().endswith("<tool_response>\nrain\n</tool_response>\n>")


def test_settings_are_kept_and_tools_that_are_none_are_said(browser: Any, server: Running) -> None:
    with visit(browser, server.url) as page:
        set_fields(page, system="Be brief.", temperature="0.9", tools="{}")
        page.reload()
        asked = reply(page, "one")
        say(page, "abc")
        assert "This is not a list of tools" in page.evaluate("document.getElementById('tools').validationMessage")
        page.fill("#tools", "")
        page.keyboard.press("Escape")
        page.press("#say", "Enter")
        answer(page)
        assert asked[0]["messages"][0] == {"role": "system", "content": "Be brief."}
        assert asked[0]["temperature"] == 0.9 and "tools" not in asked[0]


def test_code_and_answers_are_copied_as_they_were_written(browser: Any, server: Running) -> None:
    code = "def f():\n\treturn '<b>'  \n"
    with visit(browser, server.url, permissions=["clipboard-read", "clipboard-write"]) as page:
        reply(page, f"Look:\n\n```py\n{code}\n```\n")
        say(page, "abc")
        answer(page)
        read = "navigator.clipboard.readText()"
        page.click(".code button")
        wait_for(page, "document.querySelector('.code button').textContent === 'Copied'")
        assert page.evaluate(read) == code
        # Over plain HTTP there is no such interface, and what is selected is copied.
        page.evaluate("void (navigator.clipboard.writeText = () => Promise.reject(new Error('not allowed')))")
        page.click("#talk .foot >> text=Copy")
        wait_for(page, "document.querySelector('#talk .assistant .foot button:last-child').textContent === 'Copied'")
        assert page.evaluate(read) == f"Look:\n\n```py\n{code}\n```\n"
