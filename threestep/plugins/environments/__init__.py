"""Environments and tools that answer the model, turn by turn: in rollouts, in chats, and outside of them, by
`threestep inspect env`: listed, played in the terminal, checked."""

from training.utils.plugins.plugin import Command, Hooks, Plugin

_FLAGS = (f"{__name__}.arguments:EnvironmentArguments", f"{__name__}.conversation_arguments:ConversationArguments")

PLUGIN = Plugin(
    "environments",
    "environments and tools that answer the model",
    needs=("ragged", "report", "serving"),
    commands={
        "inspect env": Command(__name__, "list, try and check environments before a run", earlier="env"),
    },
    flags={"step3_ppo": _FLAGS, "chat": (*_FLAGS, f"{__name__}.arguments:OpeningRowArguments")},
    topics={"environment": "Conversations with environments and tools"},
    tables={"data_sources": {"verifiers:": f"{__name__}.driven.verifiers_tasks:VerifiersTasks"}},
    hooks=Hooks(
        check=f"{__name__}.checks:check_beside_environments", partners=f"{__name__}.partners:EnvironmentPartners"
    ),
)
