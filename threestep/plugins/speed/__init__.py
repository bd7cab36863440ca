"""Models that compute faster or keep less: fused and compiled parts, MLPs in tiles, layer inputs on the host,
another library of products."""

from training.utils.plugins.plugin import EVERY_STEP, Hooks, Plugin

_ONE_MODEL = (f"{__name__}.arguments:SpeedArguments", f"{__name__}.arguments:CompilingArguments")

PLUGIN = Plugin(
    "speed",
    "models that compute faster or use less memory, with the same results",
    flags={
        EVERY_STEP: (f"{__name__}.arguments:ProductsArguments",),
        **dict.fromkeys(("step1_sft", "step2_reward", "step2_dpo"), _ONE_MODEL),
        "step3_ppo": (f"{__name__}.arguments:PpoSpeedArguments",),
    },
    tables={
        "kept_as_begun": {"cpu_products": None},
        "backends": {"cpu_products": f"{__name__}.cpu_products:backend"},
        "advice": {
            "torch_compile": {"other_forward": "--torch_compile false", "compile": " and use --torch_compile"},
        },
    },
    hooks=Hooks(
        check=f"{__name__}.checks:check",
        step_needs=f"{__name__}.checks:step_needs",
        preparers=f"{__name__}.preparers:preparers",
    ),
)
