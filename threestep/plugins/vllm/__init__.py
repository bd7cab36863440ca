"""The rollout engines of vLLM: in the training's own process (`vllm`), and by servers elsewhere (`vllm_server`)."""

from training.utils.plugins.plugin import EngineEntry, Hooks, Plugin

PLUGIN = Plugin(
    "vllm",
    "generates responses with vLLM, in the training process or on servers",
    needs=("speculation",),
    flags={"step3_ppo": (f"{__name__}.draft_arguments:VllmDraftArguments",)},
    topics={"vllm": "vLLM (--rollout_engine vllm)"},
    tables={
        "rollout_engines": {
            "vllm": EngineEntry(
                f"{__name__}.engine:VllmRollout",
                flags=f"{__name__}.arguments:VllmArguments",
                note="the vllm package, threestep/plugins/vllm/README.md",
                other_logprobs=True,
                server=f"{__name__}.own_server:server_command",
                head_writer=f"{__name__}.head_folder:write_for_vllm",
            ),
            "vllm_server": EngineEntry(
                f"{__name__}.servers.engine:VllmServerRollout",
                flags=f"{__name__}.servers.arguments:VllmServerArguments",
                note="vLLM servers, only for training, threestep/plugins/vllm/servers.md",
                other_logprobs=True,
            ),
        },
        "decode_loops": {"vllm_speculate": f"{__name__}.drafting:asked_drafts"},
        "meant_flags": {"vllm_num_engines": ("rollout_engine",)},
    },
    hooks=Hooks(check=f"{__name__}.checks:check"),
)
