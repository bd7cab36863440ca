"""Scalar models of images and text: new, saved, read by plain transformers, and on the trunk of a policy."""

from __future__ import annotations

import copy
import json
import shutil
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForSequenceClassification

from tests.support.lora_settings import lora_settings
from tests.support.two_roles import read_while_learning, trained
from tests.support.vision_models import FAMILIES, Family, answers, awake, sequence
from threestep.plugins.images.models.pictured import RowImages, own_inputs
from threestep.plugins.lora.shared_trunk import scalar_model_on_trunk
from training.utils.base.errors import ThreestepError
from training.utils.contracts.documents import plain, shared_prompt, together, unshared
from training.utils.layout.rows import packed_rows
from training.utils.loading.models import load_causal_lm, load_scalar_model, prepared
from training.utils.loading.saving import save_model
from training.utils.models.families import is_beside_language, scalar_model_class
from training.utils.models.layout_check import check_padded, why_not_packed
from training.utils.models.own_forward import own_forward_of, read_again, read_own_forward
from training.utils.models.settings import ModelSettings
from training.utils.models.token_model import ScalarModel

CPU = torch.device("cpu")


class Tokenizer(SimpleNamespace):
    """What of one a scalar model asks for."""

    def __len__(self) -> int:
        return 96

    def save_pretrained(self, folder) -> None:
        pass


TOKENIZER = Tokenizer(pad_token_id=0)


def row(family, *parts, seed):
    tokens = sequence(family, *parts, seed=seed)
    tokens.is_target[-3:] = True
    return plain(tokens)


def load(folder, images=None, must_have_head=True, **settings):
    settings = lora_settings(str(folder), takes_media=True, **settings)
    return load_scalar_model(settings, torch.float64, TOKENIZER, must_have_head, media=images).eval()


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[] if name == "qwen2_vl" else [pytest.mark.long]) for name in FAMILIES],
)
def made(request, tmp_path_factory):
    """A family, its images, its scalar model with a new head, and the folder of that model."""
    family, place = awake(FAMILIES[request.param]()), tmp_path_factory.mktemp(request.param)
    family.model.save_pretrained(place / "language")
    rows = (row(family, 2, "image 0", 4, seed=1), row(family, 3, "image 3", 1, "image 2", 5, seed=2))
    images = RowImages(family.pixels, rows)
    torch.manual_seed(0)
    model = load(place / "language", images, must_have_head=False)
    torch.nn.init.normal_(model.score.weight)
    read_again(model)
    save_model(place / "reward", model, model.state_dict(), TOKENIZER)
    return SimpleNamespace(family=family, images=images, model=model, place=place, folder=place / "reward")


def plain_score(body, weight_1H, document, images) -> torch.Tensor:
    """Of the last token of one sequence, by transformers' own body and the head beside it."""
    (segment,) = document.segments
    accepted = ("mm_token_type_ids", "token_type_ids")
    named = {"Gemma3Model": accepted[1:], "LlavaModel": (), "Idefics3Model": ()}.get(type(body).__name__, accepted[:1])
    states_1TH = body(**own_inputs(body.config, segment.tokens, images.pixels_of, named))[0]
    return states_1TH[0, -1] @ weight_1H[0]


def test_the_body_is_that_of_the_language_model_and_comes_back_to_the_bit(made):
    before = made.family.model.state_dict()
    saved, again = made.model.state_dict(), load(made.folder, made.images).state_dict()
    assert saved.keys() - before.keys() == {"score.weight"}
    assert before.keys() - saved.keys() == {"lm_head.weight"}
    for name in saved.keys() & before.keys():
        assert torch.equal(saved[name], before[name]), name
    assert again.keys() == saved.keys()
    for name, weight in saved.items():
        assert torch.equal(again[name], weight), name


def test_plain_transformers_reads_the_same_scores(made):
    """The body by AutoModel, and the head's weight beside it; packed here, one sequence at a time there."""
    body, told = AutoModel.from_pretrained(made.folder, dtype=torch.float64, output_loading_info=True)
    assert not told["missing_keys"] and told["unexpected_keys"] == {"score.weight"}
    weight_1H = load_file(made.folder / "model.safetensors")["score.weight"]
    pair = shared_prompt(sequence(made.family, 3, "image 1", 2, "image 0", seed=3), answers(made.family, 3, 5))
    text = plain(sequence(made.family, 6, seed=4))
    rows = made.images.loaded(packed_rows([[pair, text]], 0))
    with torch.no_grad():
        scores_B = ScalarModel(made.model)(rows)
        values_M = ScalarModel(made.model)(rows, at="targets")
        want = [plain_score(body.eval(), weight_1H, document, made.images) for document in unshared(pair)]
        text_ids = text.segments[0].tokens.input_ids.unsqueeze(0)
        want.append(body(input_ids=text_ids)[0][0, -1] @ weight_1H[0])
    assert torch.allclose(scores_B.double(), torch.stack(want), rtol=0, atol=1e-5)  # scores are read in float32
    assert values_M.shape == (8,) and values_M.isfinite().all()


def test_its_folder_says_what_it_is(made):
    config = json.loads((made.folder / "config.json").read_text())
    name = type(made.family.model).__name__.replace("ForConditionalGeneration", "ForSequenceClassification")
    assert config["architectures"] == [name] == [type(made.model).__name__]
    language, reward = (load_file(made.place / part / "model.safetensors") for part in ("language", "reward"))
    assert reward.keys() - language.keys() == {"score.weight"}
    heads = language.keys() - reward.keys()
    assert len(heads) <= 1 and all(head.endswith("lm_head.weight") for head in heads)
    if name == "Gemma3ForSequenceClassification":
        theirs = AutoModelForSequenceClassification.from_pretrained(made.folder, dtype=torch.float64).state_dict()
        assert all(torch.equal(theirs[key], weight) for key, weight in made.model.state_dict().items())


def test_it_is_checked_on_images_before_it_trains(made):
    own, read = own_forward_of(made.model), ScalarModel(made.model)
    check_padded(made.model, read, CPU)
    assert why_not_packed(made.model, read, 20, CPU) is None
    assert own.with_media.of_scores and len(own.with_media.numbers_M) == 2
    reason = own.with_media.why_not(lambda rows: read(rows) + 1e-4, CPU, text=None)
    assert reason.startswith("rows with images differ by 0.0001 ")
    constant_B = own.with_media.numbers_M.float()
    assert own.with_media.why_not(lambda rows: constant_B, CPU, None) == (
        "replacing an image changes nothing that it computes"
    )


def test_a_tensor_that_is_not_there_is_refused(made, tmp_path):
    stored = load_file(made.folder / "model.safetensors")
    lacking = {"a reward model, got one without score.weight": "score.weight"}
    lacking["but lacks the tensor model"] = next(name for name in stored if "layers.1." in name)
    for place, (said, name) in enumerate(lacking.items()):
        folder = shutil.copytree(made.folder, tmp_path / str(place))
        left = {key: weight for key, weight in stored.items() if key != name}
        save_file(left, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(ThreestepError, match=said):
            load(folder)


def test_a_language_model_is_no_reward_model_and_the_other_way_round(made):
    with pytest.raises(ThreestepError, match="expected a model for sequence classification, got "):
        load(made.place / "language")
    settings = ModelSettings(str(made.folder), takes_media=True)
    with pytest.raises(ThreestepError, match="expected a language model, got a model for sequence classification"):
        load_causal_lm(settings, torch.float64, 96, media=made.images)


def test_adapters_stand_on_the_language_model_alone(made):
    model = load(made.folder, lora_dim=2)
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    part = "text_model" if hasattr(model.model, "text_model") else "language_model"
    assert "score.weight" in trained and len(trained) > 10
    assert all(".lora_" in name and f".{part}." in name for name in trained - {"score.weight"})


def test_a_critic_on_the_trunk_of_a_policy(made):
    """The same weights, of images too."""
    settings = ModelSettings(str(made.place / "language"), takes_media=True)
    policy = load_causal_lm(settings, torch.float64, 96, media=made.images)
    critic = scalar_model_on_trunk(policy, ModelSettings("", freeze_vision_tower=False), 0, media=made.images)
    assert own_forward_of(critic).with_media.of_scores and type(critic).__name__ == type(made.model).__name__
    assert critic.model.get_input_embeddings().weight is policy.model.get_input_embeddings().weight


ACTOR = lora_settings("", lora_dim=3, takes_media=True)
CRITIC = lora_settings("", lora_dim=2, lora_alpha=6.0, takes_media=True)


def images_of(family: Family) -> RowImages:
    examples = (["image 0", 2], [1, "image 1", 2])
    found = (together([sequence(family, *shape), *answers(family, 3)]) for shape in examples)
    return RowImages(family.pixels, tuple(map(plain, found)))


def drawn(model: Any, seed: int) -> Any:
    """What trains, also what starts with 0, drawn anew."""
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        if weight.requires_grad:
            weight.data.copy_(0.3 * torch.randn(weight.shape, generator=generator, dtype=weight.dtype))
    return model


def start(name: str) -> tuple[Family, RowImages]:
    """A family as it is loaded: its own forward is measured before adapters are put on."""
    family = awake(FAMILIES[name]())
    images = images_of(family)
    read_own_forward(family.model, media=images)
    return family, images


def shared(name: str) -> tuple[Any, Any]:
    family, images = start(name)
    critic = scalar_model_on_trunk(family.model, CRITIC, pad_token_id=0, media=images)
    own = own_forward_of(critic)
    assert own is not None and own.with_media is not None and own.with_media.of_scores
    return prepared(family.model, ACTOR), critic.eval()


def apart(name: str) -> tuple[Any, Any]:
    """The same without anything in common."""
    family, images = start(name)
    config = copy.deepcopy(family.model.config)
    config.num_labels = 1
    critic = scalar_model_class(config).from_config(config).double().eval()
    critic.base_model.load_state_dict(family.model.base_model.state_dict())
    read_own_forward(critic, media=images)
    return prepared(family.model, ACTOR), prepared(critic, CRITIC)


@pytest.mark.parametrize("name", FAMILIES)
def test_it_reads_and_learns_as_two_separate_models_do(name):
    """A few steps of Adam on both losses, in float64: equal to the last bit, as the sums are the same ones."""
    family = FAMILIES[name]()
    prompt = shared_prompt(sequence(family, 2, "image 0", 3), answers(family, 2, 5))
    text = shared_prompt(sequence(family, 6), answers(family, 3))
    rows = images_of(family).loaded(packed_rows([[prompt, text]], 0))
    numbers, weights = [], []
    for make in (shared, apart):
        actor, critic = make(name)
        drawn(actor, 1), drawn(critic, 2)
        numbers.append(read_while_learning(actor, critic, rows, steps=2))
        weights.append([*trained(actor).values(), *trained(critic).values()])
    assert all(one.equal(other) for one, other in zip(*numbers, strict=True))
    assert all(one.equal(other) for one, other in zip(*weights, strict=True))
    assert numbers[0][0].equal(numbers[0][3])  # the reference stays
    assert not numbers[0][1].equal(numbers[0][4]) and not numbers[0][2].equal(numbers[0][5])


@pytest.mark.parametrize("name", ["qwen2_vl", "gemma3"])
def test_a_new_critic_passes_the_check_of_images_though_it_scores_everything_0(name):
    _, critic = shared(name)
    check_padded(critic, ScalarModel(critic), torch.device("cpu"))
    own = own_forward_of(critic)
    assert own is not None and own.with_media is not None and not own.with_media.numbers_M.any()


@pytest.mark.parametrize("name", ["qwen2_vl", "gemma3"])
def test_tower_and_projector_are_there_once_and_frozen(name):
    actor, critic = shared(name)
    places = []
    for model in (actor, critic):
        of_vision = is_beside_language(model)
        weights = [weight for part, weight in model.named_parameters() if of_vision(part)]
        assert weights and not any(weight.requires_grad for weight in weights)
        places.append({weight.data_ptr() for weight in weights})
    assert places[0] == places[1]
