"""Datasets of the hub: any, as `hub:OWNER/NAME`, and those that DeepSpeed-Chat's users know by their names. Of the
latter, a folder that `save_to_disk` wrote (or one of data files) is the dataset if its path ends in the name."""

from training.utils.plugins.plugin import Plugin

_CLASSES = {
    "Dahoas/rm-static": "DahoasConversations",
    "Dahoas/full-hh-rlhf": "DahoasConversations",
    "Dahoas/synthetic-instruct-gptj-pairwise": "SyntheticInstruct",
    "yitingxie/rlhf-reward-datasets": "RlhfRewardDatasets",
    "openai/webgpt_comparisons": "WebgptComparisons",
    "stanfordnlp/SHP": "StanfordShp",
    "pvduy/sharegpt_alpaca_oa_vicuna_format": "SharegptVicuna",
    "Cohere/miracl-zh-queries-22-12": "Miracl",
    "Cohere/miracl-ja-queries-22-12": "Miracl",
    "mkqa-Chinese": "MkqaChinese",
    "mkqa-Japanese": "MkqaJapanese",
    "Hello-SimpleAI/HC3-Chinese": "Hc3Chinese",
    "wangrui6/Zhihu-KOL": "ZhihuKol",
    "lmqg/qg_jaquad": "QgJaquad",
    "lmqg/qag_jaquad": "QagJaquad",
}

PLUGIN = Plugin(
    "hub_datasets",
    "any hub dataset as hub:OWNER/NAME, and the datasets that DeepSpeed-Chat knows by name",
    tables={
        "row_stores": {"hub": f"{__name__}.hub_rows:HubRows"},
        "data_sources": {
            **{name: f"{__name__}.datasets:{kind}" for name, kind in _CLASSES.items()},
            "local/jsonfile": f"{__name__}.jsonfile:LocalJsonFile",
        },
    },
)
