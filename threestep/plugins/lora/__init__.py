"""LoRA with PEFT: adapters trained on frozen weights, and adapter folders."""

from training.utils.plugins.plugin import AdapterEntry, Hooks, Plugin

_FLAGS = (f"{__name__}.arguments:LoraArguments",)

PLUGIN = Plugin(
    "lora",
    "LoRA: adapters on frozen weights, one trunk for actor and critic, and adapter folders",
    flags={
        "step1_sft": _FLAGS,
        "step2_reward": _FLAGS,
        "step2_dpo": _FLAGS,
        "step3_ppo": (f"{__name__}.arguments:RolesLoraArguments",),
    },
    topics={"lora": "LoRA adapters"},
    tables={
        "adapters": {"adapter_config.json": AdapterEntry(f"{__name__}.given:find", f"{__name__}.adding:described")},
        "critics": {"share_trunk": f"{__name__}.shared_trunk:scalar_model_on_trunk"},
        "advice": {"lora_dim": {"own_reference": "--lora_dim above 0 and --only_optimize_lora true"}},
    },
    hooks=Hooks(
        check=f"{__name__}.checks:check",
        step_needs=f"{__name__}.checks:step_needs",
        preparers=f"{__name__}.preparers:preparers",
    ),
)
