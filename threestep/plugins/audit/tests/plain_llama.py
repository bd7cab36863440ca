"""A plain step of SFT with transformers' Llama, whose weights and gradients are in the record, with one fault planted
between the loss and the weights: ranks are simulated, their gradients added up."""

from __future__ import annotations

import json

import torch

from threestep.plugins.audit.recording.files import StepRecord
from threestep.plugins.audit.tests.plain_trainer import PlainTrainer

TEMPERATURE = 0.7


class PlainLlama(PlainTrainer):
    """The loss, its mask and the logged numbers are right; the gradient is of something else."""

    def llama(self) -> StepRecord:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(self.setting.seed)
        config = LlamaConfig(
            vocab_size=24, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, initializer_range=0.2, pad_token_id=0,
        )  # fmt: skip
        model = LlamaForCausalLM(config)
        masters = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        model.to(self.setting.dtype)
        half = self.setting.dtype == torch.bfloat16
        self.settings = {
            "reduction": "token mean", "temperature": TEMPERATURE, "dtype": "bf16" if half else "fp32",
            "accumulation_steps": 5.0,
        }  # fmt: skip
        parts = self.split([self.row(number) for number in range(10)])
        count = sum(int(row.mask.sum()) for own in parts for part in own for row in part)
        total, losses = {name: torch.zeros_like(weight) for name, weight in masters.items()}, []
        for rank, own in enumerate(parts):
            for micro, part in enumerate(own):
                batch = ids, mask, real = self.batch(part)
                self.note(rank, micro, part, batch)
                read = self.joined(model, ids, real) if self.is_joined else model(ids, attention_mask=real).logits
                logits = torch.nn.functional.pad(read[:, :-1].float(), (0, 0, 1, 0))
                logprobs = self.logprobs(logits, ids, TEMPERATURE)
                self.put(rank, logprobs=self.flat(logprobs.detach(), real), loss_mask=self.flat(mask, real))
                losses.append(-(logprobs * mask).sum() / count)
                backward = self.backward_loss(logprobs, logits, (ids, mask, real), count)
                if self.is_dropped(rank, micro):
                    continue
                for name, gradient in zip(masters, torch.autograd.grad(backward, [*model.parameters()]), strict=True):
                    total[name] += gradient.float()
        scale = {
            "divided by ranks twice": 1 / len(parts), "summed over ranks": float(len(parts)), "divided by micro": 1 / 3,
            "multiplied by micro": 3.0, "sign": -1.0, "last, partial accumulation": 3 / 5,
        }.get(self.fault, 1.0)  # fmt: skip
        self.figures = {"loss": float(sum(losses).detach()), "denominator": float(count)}
        self.state = {f"gradients.{name}": (scale * value).numpy() for name, value in total.items()}
        self.state |= {f"weights_before.{name}": value.numpy() for name, value in masters.items()}
        norm = torch.cat([scale * value.flatten() for value in total.values()]).norm()
        self.figures["grad_norm"] = float(norm)
        record = self.record("sft")
        head = type(record.head)(**{**vars(record.head), "model": json.loads(config.to_json_string())})
        return StepRecord(head, record.ranks, record.state)

    @property
    def is_joined(self) -> bool:
        return self.fault.startswith("packed rows") and not self.setting.padded

    def joined(self, model: torch.nn.Module, ids: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        """The logits of rows that are one row, under a causal mask."""
        lengths = real.sum(1).tolist()
        spans = lengths if "places again" in self.fault else [sum(lengths)]
        places = [torch.arange(span) for span in spans]
        row = {"input_ids": ids[real][None], "position_ids": torch.cat(places)[None]}
        found = model(**row, attention_mask=torch.ones_like(row["input_ids"])).logits[0]
        return found.new_zeros(*ids.shape, found.shape[-1]).masked_scatter(real.unsqueeze(-1), found)

    def backward_loss(
        self, logprobs: torch.Tensor, logits: torch.Tensor, batch: tuple[torch.Tensor, ...], count: int
    ) -> torch.Tensor:
        """The part that a micro-batch adds to the gradient."""
        ids, mask, real = batch
        if self.fault == "micro-batch means":
            return -(logprobs * mask).sum() / mask.sum() / 3 / self.setting.ranks
        if self.fault == "gradient without temperature":
            logprobs = self.logprobs(logits, ids, 1.0)
        return -(logprobs * mask).sum() / count

    def is_dropped(self, rank: int, micro: int) -> bool:
        return {
            "first micro-batch dropped": micro == 0,
            "last micro-batch dropped": micro == 2,
            "first rank alone": rank > 0,
        }.get(self.fault, False)


# As `plain_trainer.FAULTS`.
LLAMA_FAULTS = (
    ("llama", "temperature left out", "logprobs", "temperature is left out"),
    ("llama", "packed rows as one", "logprobs", "see each other: they are one sequence"),
    ("llama", "packed rows, places again", "logprobs", "see each other, though their positions begin again"),
    ("llama", "divided by ranks twice", "gradients", "divided by the number of ranks once more"),
    ("llama", "summed over ranks", "gradients", "multiplied by the number of ranks"),
    ("llama", "divided by micro", "gradients", "divided by the number of micro-batches"),
    ("llama", "multiplied by micro", "gradients", "multiplied by the number of micro-batches"),
    ("llama", "last, partial accumulation", "gradients", "last, partial one"),
    ("llama", "sign", "gradients", "sign"),
    ("llama", "first micro-batch dropped", "gradients", "first micro-batch's gradient is left out"),
    ("llama", "last micro-batch dropped", "gradients", "last micro-batch's gradient is left out"),
    ("llama", "first rank alone", "gradients", "first rank alone"),
    ("llama", "micro-batch means", "gradients", "mean over micro-batches of their means"),
    ("llama", "gradient without temperature", "gradients", "temperature is left out"),
)
