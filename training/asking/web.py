"""A web page to talk on, by Gradio, for this machine alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from training.asking.talk import Talk
from training.utils.run.errors import ThreestepError

ADDRESS = "127.0.0.1"


def serve(new_talk: Callable[[], Talk], port: int) -> None:
    """Serve the page on this machine's own address until the program is ended. ThreestepError without Gradio, or where
    the port is taken.

    new_talk: a conversation of its own for every message; the page keeps the history.
    """
    page = made_page(new_talk)
    try:
        # No link to the outside, no call home.
        page.launch(server_name=ADDRESS, server_port=port, share=False, quiet=False)
    except OSError as problem:
        raise ThreestepError(f"--web_port {port}: {problem}; name another port") from problem


def made_page(new_talk: Callable[[], Talk]) -> Any:
    """The page: one column for each model, one line to type in, and the flags of sampling."""
    gradio = _gradio()
    first = new_talk()
    with gradio.Blocks(title="Threestep", analytics_enabled=False) as page:
        state = gradio.State(None)
        with gradio.Row():
            columns = [gradio.Chatbot(label=asked.name) for asked in first.models]
        said = gradio.Textbox(label="you", placeholder="type a message or a command (/help), and press Enter")

        def heard(line: str, talk: Talk | None) -> Iterator[list[Any]]:
            talk = new_talk() if talk is None else talk
            for note in told(talk, line):
                yield [*_shown(talk, note), "", talk]

        said.submit(heard, [said, state], [*columns, said, state])
    return page


def told(talk: Talk, line: str) -> Iterator[str]:
    """Obey or answer `line`; yield after each change what is to be said besides the conversation."""
    try:
        if line.startswith("/save"):  # a page that another site drives must not write files
            raise ThreestepError("/save is for the terminal")
        if line.startswith("/"):
            reply = talk.command(line)
            yield "close the page and stop the program to end" if reply.end else reply.say
            if not reply.answer_again:
                return
        elif not line.strip():
            return
        else:
            talk.ask(line)
        for place in range(len(talk.models)):
            for _ in talk.answer(place):
                yield ""
            talk.score(place)
        yield ""
    except ThreestepError as mistake:
        talk.drop_turn()
        yield str(mistake)


def _shown(talk: Talk, note: str) -> list[list[dict[str, str]]]:
    """The history of each column in Gradio's form."""
    columns = []
    for place in range(len(talk.models)):
        shown: list[dict[str, str]] = []
        for turn in talk.turns:
            shown.append({"role": "user", "content": turn.said})
            if place in turn.answers:
                score = f"\n\n*score {turn.scores[place]:.3f}*" if place in turn.scores else ""
                shown.append({"role": "assistant", "content": turn.answers[place].text.strip() + score})
        columns.append([*shown, {"role": "assistant", "content": note}] if note else shown)
    return columns


def _gradio() -> Any:
    try:
        import gradio
    except ImportError as problem:
        raise ThreestepError(
            "--web needs the package gradio, which is not installed: pip install gradio, or talk in the terminal"
        ) from problem
    return gradio
