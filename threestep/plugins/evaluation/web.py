"""A Gradio chat page, served to this machine only, to whoever has its token."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from threestep.plugins.evaluation.asgi import GuardedApp, server_of
from threestep.plugins.report.figures.reading import short_names
from threestep.plugins.serving.access import Door
from threestep.plugins.serving.ports import check_port, listening, taking_port
from training.utils.base.errors import ThreestepError
from training.utils.contracts.rows import MOST_FILE_BYTES

if TYPE_CHECKING:
    from threestep.plugins.evaluation.talk import Talk

# An answer is Markdown that a model wrote: whatever it names elsewhere (pictures, styles, frames, scripts) is not
# fetched, for its address could carry the conversation away. Gradio's page needs inline scripts and styles.
POLICY = (
    "default-src 'none'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; worker-src 'self' blob:; "
    "manifest-src 'self'; base-uri 'self'; form-action 'none'; frame-ancestors 'none'"
)

# The conversation takes the room that is left, and what one types stays at the bottom of the screen, a phone's too.
_STYLE = """
.gradio-container { padding: 8px 8px 130px !important; }
#title h1 { font-size: 20px; margin: 4px 2px; overflow-wrap: anywhere; }
#columns > * { min-width: min(100%, 300px) !important; height: calc(100vh - 290px); min-height: 220px; }
#asking { position: fixed; left: 0; right: 0; bottom: 0; z-index: 100; padding: 8px; gap: 6px; width: auto;
  background: var(--body-background-fill); border-top: 1px solid var(--border-color-primary); }
#asking button { min-width: 0; }
@media (max-width: 640px) {
  #columns > *:not(:only-child) { height: calc(50vh - 150px); min-height: 200px; } }
"""
_SEED = "seed"


def check_page(port: int) -> None:
    """ThreestepError without Gradio, or if the port is in use: before a model is loaded."""
    _gradio()
    check_port("--web_port", port)


def serve(new_talk: Callable[[], Talk], port: int, announce: Callable[[str], None]) -> None:
    """Serve the page on the loopback address until the program ends, to whoever has the token of its address. announce:
    called with the address. ThreestepError without Gradio, or if the port is in use. new_talk: makes a conversation for
    each visitor."""
    door = Door()
    app = guarded_page(new_talk, door)
    with taking_port("--web_port", port):
        socket = listening(port)
    announce(f"{door.address(socket.getsockname()[1])} (Ctrl-C ends)")
    server_of(app).run(sockets=[socket])


def guarded_page(new_talk: Callable[[], Talk], door: Door) -> GuardedApp:
    """The page as an ASGI application behind `door`. ThreestepError without Gradio."""
    gradio = _gradio()
    from fastapi import FastAPI  # Gradio's

    page = build_page(new_talk)
    app = FastAPI(openapi_url=None)
    # No fonts or links from elsewhere.
    gradio.mount_gradio_app(
        app, page, path="/", css=_STYLE, theme=_theme(), footer_links=[], ssr_mode=False, max_file_size=MOST_FILE_BYTES
    )
    return GuardedApp(app, door, POLICY)


def build_page(new_talk: Callable[[], Talk]) -> Any:
    """A title, a column per model, the line to type in with its buttons, and the sampling settings."""
    from threestep.plugins.evaluation.talk import SCORES_COMPARE

    gradio = _gradio()
    first = new_talk()
    names = " and ".join(short_names([Path(model.name) for model in first.models]))
    with gradio.Blocks(title=f"{names} · Threestep", analytics_enabled=False, fill_height=True) as page:
        state = gradio.State(None)
        gradio.Markdown(f"# {names}", elem_id="title")
        if first.scorer is not None:
            gradio.Markdown(SCORES_COMPARE)
        with gradio.Row(elem_id="columns"):
            columns = [
                gradio.Chatbot(label=model.name, height=None, show_label=len(first.models) > 1, buttons=["copy"])
                for model in first.models
            ]
        with gradio.Accordion("Sampling", open=False):
            settings = _settings(gradio, first)
        with gradio.Column(elem_id="asking"):
            typed = gradio.Textbox(
                label="you", show_label=False, lines=1, max_lines=6, autofocus=True, container=False,
                placeholder="type a message or a command (/help), and press Enter",
            )  # fmt: skip
            with gradio.Row():
                send = gradio.Button("Send", variant="primary", size="sm")
                stop = gradio.Button("Stop", size="sm")
                sees = all(model.reads is not None for model in first.models)
                picture = gradio.UploadButton("Picture", file_types=["image"], size="sm", visible=sees)
                retry = gradio.Button("Answer again", size="sm")
                reset = gradio.Button("New conversation", size="sm")

        def submit(line: str, talk: Talk | None) -> Iterator[list[Any]]:
            talk = new_talk() if talk is None else talk
            for note in respond(talk, line):
                yield [*_columns(talk, note), "", talk, *values_of(talk)]

        shown = [*columns, typed, state, *settings.values()]
        running = [send.click(submit, [typed, state], shown), typed.submit(submit, [typed, state], shown)]
        running += [retry.click(partial(submit, "/retry"), [state], shown)]
        stop.click(None, cancels=running)
        picture.upload(partial(_attach, new_talk), [picture, state], [state, *columns])
        for begin in (reset.click, *(column.clear for column in columns)):
            begin(partial(submit, "/reset"), [state], shown, cancels=running)
        for name, control in settings.items():
            # The visitor's change: a command's, which the page shows too, is made already.
            begins = control.blur if name == "system" else control.input  # a system prompt ends the conversation
            begins(partial(_set, new_talk, name), [control, state], [state, control, *columns])
    return page


def values_of(talk: Talk) -> list[Any]:
    """The settings' values, in the order of the page."""
    return [talk.system, *(getattr(talk.sampling, name) for name in _SAMPLING), talk.seed]


def change(talk: Talk, name: str, value: Any) -> str:
    """Set a control's value by the command of its name; return the mistake, or ""."""
    if name == "system" and value == talk.system:
        return ""  # left as it was: the conversation goes on
    try:
        talk.enter(f"/{name} {value}")
    except ThreestepError as mistake:
        return str(mistake)
    return ""


_SAMPLING = ("temperature", "top_p", "top_k", "max_new_tokens")


def _settings(gradio: Any, talk: Talk) -> dict[str, Any]:
    """The controls, by the command that each stands for."""
    system, temperature, top_p, top_k, most, seed = values_of(talk)
    controls = {
        "system": gradio.Textbox(system, label="system prompt (starts a new conversation)", lines=1, max_lines=6)
    }
    with gradio.Row():
        controls |= {
            "temperature": gradio.Slider(0, 2, temperature, step=0.05, label="temperature (0: most likely token)"),
            "top_p": gradio.Slider(0.05, 1, top_p, step=0.05, label="top_p (1: all)"),
            "top_k": gradio.Number(top_k, precision=0, minimum=0, label="top_k (0: all)"),
            "max_new_tokens": gradio.Number(most, precision=0, minimum=1, label="maximum tokens per answer"),
            _SEED: gradio.Number(seed, precision=0, minimum=0, label="seed"),
        }
    return controls


def _set(new_talk: Callable[[], Talk], name: str, value: Any, talk: Talk | None) -> list[Any]:
    gradio = _gradio()
    talk = new_talk() if talk is None else talk
    mistake = change(talk, name, value)
    if mistake:
        gradio.Warning(mistake)
    names = ("system", *_SAMPLING, _SEED)
    return [talk, values_of(talk)[names.index(name)] if mistake else gradio.skip(), *_columns(talk, "")]


def _attach(new_talk: Callable[[], Talk], path: str, talk: Talk | None) -> list[Any]:
    """Take an uploaded picture; a note describes it, or its mistake."""
    talk = new_talk() if talk is None else talk
    try:
        note = talk.attach(path)
    except ThreestepError as mistake:
        note = str(mistake)
    return [talk, *_columns(talk, note)]


def _theme() -> Any:
    """Gradio's theme with the fonts of the machine: by default it loads some from Google."""
    fonts = {"font": ["system-ui", "sans-serif"], "font_mono": ["ui-monospace", "monospace"]}
    return (
        _gradio()
        .themes.Default(primary_hue="blue", **fonts)
        .set(button_primary_background_fill="*primary_700", button_primary_background_fill_dark="*primary_700")
    )


def _gradio() -> Any:
    # It reads these when it is imported: no telemetry, no record of conversations in the browser.
    os.environ.update(GRADIO_ANALYTICS_ENABLED="False", GRADIO_RUN_HISTORY="False")
    try:
        import gradio
    except ImportError as problem:
        raise ThreestepError(
            "--web needs the package gradio, which is not installed; install it (pip install gradio), or chat in the "
            "terminal"
        ) from problem
    return gradio


def respond(talk: Talk, line: str) -> Iterator[str]:
    """Run or answer `line`; yield after each change a note to show below the conversation, or ""."""
    if not line.strip():
        return
    try:
        if line.startswith(("/save", "/image")):  # a page that another site controls must not write or read files
            raise ThreestepError(f"{line.split()[0]} is available only in the terminal")
        reply = talk.enter(line)
        yield "to end the chat, close the page and stop the program" if reply.end else reply.text
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
            pictures = "".join(f"*{picture.words}*\n\n" for picture in turn.pictures)
            shown.append({"role": "user", "content": pictures + turn.question})
            if place in turn.answers:
                answer = turn.answers[place]
                text, below = answer.text.strip(), f"\n\n*{answer.note}*" if answer.note else ""
                if answer.paths or answer.trajectory:  # the page would take the tags for HTML
                    text = text.replace("<", "&lt;")
                score = f"\n\n*score {turn.scores[place]:.3f}*" if place in turn.scores else ""
                shown.append({"role": "assistant", "content": text + below + score})
        columns.append([*shown, {"role": "assistant", "content": note}] if note else shown)
    return columns
