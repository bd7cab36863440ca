"""Texts of every kind that a tokenizer meets, made by a seeded program: code, numbers, scripts, emoji, whitespace.

None holds a special token: references read those as tokens or as text, each in its own way.
"""

from __future__ import annotations

import random
from collections.abc import Callable

_WORDS = (
    "harbour berth ledger tide don't we'll IT'S they've I'd isn't o'clock naïve café Zürich façade co-operate e.g. "
    "the The THE of and is was river-side MixedCase snake_case camelCase HTTPServer v2.0 covid-19 Mr. U.S.A."
).split()
_SCRIPTS = (
    "Привет мир как дела сегодня ёлка", "Γειά σου Κόσμε ΑΒΓ άέή", "שלום עולם מה שלומך", "مرحبا بالعالم كيف الحال ١٢٣",
    "नमस्ते दुनिया क्षत्रिय १२३", "สวัสดีชาวโลก ยินดีต้อนรับ", "你好世界今天天气不错我们去公园", "こんにちは世界カタカナひらがな",
    "안녕하세요 세계 반갑습니다", "ｆｕｌｌ　ｗｉｄｔｈ １２３ ﾊﾝｶｸ",
    "Tiếng Việt có dấu thanh", "ქართული ენა Հայերեն አማርኛ ᚠᚢᚦ",
    "e\u0301a\u0300n\u0303 \u1100\u1161\u11a8 \u0915\u093c", "ﬁﬂ Å Ω ½ ² Ⅷ ℝ ∑∫√∞ ≤≥≠ ←→",
)  # fmt: skip
_EMOJI = "🍐 😀 👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇺🇳 ☺️ ✈ 🧑🏿‍🚀 𝒳 𓀀 🀄".split()
_BLANKS = (
    " ", "  ", "   ", "\n", "\n\n", "\n\n\n", "\t", "\t\t", "\r\n", " \n", "\n ", "\u00a0",
    "\u3000", "\u2009", " \t \n  ",
)  # fmt: skip
_MARKS = (
    ". , ; : ! ? ... - -- — – ( ) [ ] { } < > / \\ | @ # $ % ^ & * + = ~ ` ' \" ’ “ ” « » … • ¿ ¡ § © ™ € £ ¥ ₿ ° "
    "\u200b \ufeff \u00ad \u0301 // /* */ == != <= >= => -> :: && || ++ ** #!/ </ /> !!! ??? ---- ==== ____"
).split(" ")
_CODE = (
    "def {a}({b}, {c}=None):\n    if {b} == {n}:\n        return {c}[{n}:-1]\n",
    "for (int i = 0; i < {n}; ++i) {{\n\t{a}[i] += {b}->{c} * {n}.5f;\n}}\n",
    "SELECT {a}, COUNT(*) FROM {b} WHERE {c} >= {n} GROUP BY 1;\n",
    '{{"{a}": [{n}, -{n}.25e-3, null], "{b}": {{"{c}": true}}}}',
    "<div class=\"{a}\" id='{b}-{n}'>{c}&nbsp;&lt;{n}</div>\n",
    "$ {a} --{b}={n} | grep -E '^[{c}]+$' > /tmp/{a}.log 2>&1\n",
    "import {a}\n\n\nclass {b}({c}):\n    \"\"\"{a} {n}.\"\"\"\n\n    x: int = 0x{n}\n",
    "\\frac{{{a}_{{{n}}}}}{{\\sqrt{{{b}^2 + {c}}}}} \\leq 10^{{-{n}}}",
)  # fmt: skip


def _word(chance: random.Random) -> str:
    return chance.choice(_WORDS)


def _number(chance: random.Random) -> str:
    digits = str(chance.randrange(10 ** chance.randint(1, 14)))
    cents, date = chance.randrange(1000), f"{digits[:4]}-{digits[-2:]}-{digits[-1]}"
    forms = [digits, f"{int(digits):,}", f"-{digits}.{cents}", f"{digits}%", f"${digits}.99", f"0x{digits}"]
    return chance.choice([*forms, date, f"{digits}th", f"{digits}e-{digits[:2]}"])


def _code(chance: random.Random) -> str:
    names = [f"{chance.choice('abcxyz')}{chance.choice('_AzQ9')}{chance.randrange(100)}" for _ in range(3)]
    return chance.choice(_CODE).format(a=names[0], b=names[1], c=names[2], n=chance.randrange(10000))


def _script(chance: random.Random) -> str:
    text = chance.choice(_SCRIPTS)
    begin = chance.randrange(len(text))
    return text[begin : begin + chance.randint(1, 20)]


def _any_character(chance: random.Random) -> str:
    low, high = chance.choice(
        ((0x20, 0x7F), (0xA0, 0x500), (0x900, 0x1200), (0x2000, 0x3000), (0x3040, 0x9FFF), (0x1F300, 0x1FAFF))
    )
    return "".join(chr(chance.randrange(low, high)) for _ in range(chance.randint(1, 6)))


_PARTS: tuple[tuple[Callable[[random.Random], str], int], ...] = (
    (_word, 8),
    (lambda chance: chance.choice(_BLANKS), 8),
    (lambda chance: chance.choice(_MARKS), 4),
    (_number, 3),
    (_script, 3),
    (lambda chance: chance.choice(_EMOJI), 1),
    (_code, 1),
    (_any_character, 1),
)


def field_texts(count: int = 2000, seed: int = 0) -> list[str]:
    """Return as many different texts of up to 40 parts; the first ones are whitespace alone, and one character."""
    chance = random.Random(seed)
    makers, weights = zip(*_PARTS, strict=True)
    texts = dict.fromkeys([*_BLANKS, "a", " a", "a ", "1", "\na", "\u00e9", "🍐"])
    while len(texts) < count:
        parts = [make(chance) for make in chance.choices(makers, weights, k=chance.randint(1, 40))]
        texts["".join(parts)] = None
    return list(texts)[:count]
