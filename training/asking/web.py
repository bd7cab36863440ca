"""A Gradio chat page, served to this machine only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from training.asking.talk import Talk
from training.utils.run.errors import ThreestepError

ADDRESS = "127.0.0.1"


def serve(new_talk: Callable[[], Talk], port: int) -> None:
    """Serve the page on the loopback address until the program ends. ThreestepError without Gradio, or if the port is
    in use. new_talk: makes a conversation for each visitor."""
    page = build_page(new_talk)
    try:
        # No public link, no telemetry.
        page.launch(server_name=ADDRESS, server_port=port, share=False, quiet=False)
    except OSError as problem:
        raise ThreestepError(f"--web_port {port}: {problem}; give another port") from problem


def build_page(new_talk: Callable[[], Talk]) -> Any:
    """One column per model, and one line to type in."""
    try:
        import gradio
    except ImportError as problem:
        raise ThreestepError(
            "--web needs the package gradio, which is not installed; run: pip install gradio, or chat in the terminal"
        ) from problem
    first = new_talk()
    with gradio.Blocks(title="Threestep", analytics_enabled=False) as page:
        state = gradio.State(None)
        with gradio.Row():
            columns = [gradio.Chatbot(label=asked.name) for asked in first.models]
        typed = gradio.Textbox(label="you", placeholder="type a message or a command (/help), and press Enter")

        def submit(line: str, talk: Talk | None) -> Iterator[list[Any]]:
            talk = new_talk() if talk is None else talk
            for note in respond(talk, line):
                yield [*_columns(talk, note), "", talk]

        typed.submit(submit, [typed, state], [*columns, typed, state])
    return page


def respond(talk: Talk, line: str) -> Iterator[str]:
    """Run or answer `line`; yield after each change a note to show below the conversation, or ""."""
    if not line.strip():
        return
    try:
        if line.startswith("/save"):  # a page that another site controls must not write files
            raise ThreestepError("/save is available only in the terminal")
        reply = talk.enter(line)
        yield "to end, close the page and stop the program" if reply.end else reply.text
        if not reply.answer:
            return
        for place in range(len(talk.models)):
            for _ in talk.answer(place):
                yield ""
            talk.score(place)
        yield ""
    except ThreestepError as mistake:
        talk.drop_turn()
        yield str(mistake)


def _columns(talk: Talk, note: str) -> list[list[dict[str, str]]]:
    """The history of each column in Gradio's format."""
    columns = []
    for place in range(len(talk.models)):
        shown: list[dict[str, str]] = []
        for turn in talk.turns:
            shown.append({"role": "user", "content": turn.question})
            if place in turn.answers:
                score = f"\n\n*score {turn.scores[place]:.3f}*" if place in turn.scores else ""
                shown.append({"role": "assistant", "content": turn.answers[place].text.strip() + score})
        columns.append([*shown, {"role": "assistant", "content": note}] if note else shown)
    return columns
