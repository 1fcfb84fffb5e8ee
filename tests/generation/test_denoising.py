"""Sampling of masked-diffusion models against a plain loop, and what it does not depend on."""

from typing import Any

import pytest
import torch
import transformers

from toolkit.generation.denoising import DenoisingSettings, denoise
from toolkit.models.attention.packable import make_bidirectional
from toolkit.models.diffusion import Diffusion

MASK = 60


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, max_position_embeddings=64, is_causal=False
    )
    model = transformers.LlamaForCausalLM(config)
    make_bidirectional(model)
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.4)
    return model.eval()


def plain_loop(model: Any, ids: list[int], steps: int, block_length: int, shift: bool) -> list[int]:
    """Greedy, one text, written from the algorithm of the paper: predict all, keep the surest, hide the others again."""
    ids = list(ids)
    hidden = [i for i, token in enumerate(ids) if token == MASK]
    blocks = [hidden[i : i + block_length] for i in range(0, len(hidden), block_length)]
    for block in blocks:
        passes = max(1, round(steps * len(block) / len(hidden)))
        for number in range(passes):
            left = [i for i in block if ids[i] == MASK]
            keep = len(block) // passes + (number < len(block) % passes)
            with torch.no_grad():
                probabilities = model(input_ids=torch.tensor([ids])).logits[0]
            probabilities[:, MASK] = -torch.inf
            probabilities = probabilities.softmax(-1)
            found = sorted(left, key=lambda i: -float(probabilities[i - shift].max()))[:keep]
            for i in found:
                ids[i] = int(probabilities[i - shift].argmax())
    return ids


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize(("steps", "block_length"), [(12, 12), (12, 4), (5, 4), (1, 12), (40, 3)])
def test_texts_are_those_of_a_plain_loop_in_any_company(model: Any, shift: bool, steps: int, block_length: int) -> None:
    """Answers behind prompts of several lengths, and gaps within a text, all at once.

    Fails when: padding is seen, a block is begun before the last one is whole, or the surest of all blocks are kept.
    """
    texts = [[5, 6, 7, *[MASK] * 12], [8, *[MASK] * 12], [9, MASK, MASK, 3, *[MASK] * 5, 4, 4, *[MASK] * 5, 11]]
    found = denoise(model, texts, [1, 2, 3], Diffusion(MASK, shift, 12), DenoisingSettings(steps, block_length))
    assert found == [plain_loop(model, text, min(steps, 12), block_length, shift) for text in texts]


def test_a_text_is_a_function_of_its_own_seed_alone(model: Any) -> None:
    """With a temperature. Fails when: draws come from one generator for all texts, or places share their random numbers."""
    texts, settings = [[5, 6, *[MASK] * 10], [7, *[MASK] * 14]], DenoisingSettings(temperature=1.0, block_length=5)
    diffusion = Diffusion(MASK, False, 12)
    both = denoise(model, texts, [11, 12], diffusion, settings)
    assert both == [denoise(model, [text], [seed], diffusion, settings)[0] for text, seed in zip(texts, (11, 12), strict=True)]
    assert denoise(model, texts[:1], [13], diffusion, settings)[0] != both[0]
    assert MASK not in both[0] + both[1]


def test_what_is_drawn_has_the_probabilities_of_the_model(model: Any) -> None:
    """One hidden token, 4,000 times, at temperature 2. Fails when: the temperature multiplies, or the noise is not Gumbel's."""
    text = [5, 6, MASK, 8]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([text])).logits[0, 2]
    logits[MASK] = -torch.inf
    expected = (logits / 2).softmax(-1)
    drawn = denoise(model, [text] * 4000, [i * 7919 for i in range(4000)], Diffusion(MASK, False, 1), DenoisingSettings(temperature=2.0))
    counts = torch.bincount(torch.tensor([ids[2] for ids in drawn]), minlength=61) / 4000
    assert (counts - expected).abs().max() < 4 * (0.25 / 4000) ** 0.5


def test_a_text_that_has_ended_goes_no_further(model: Any) -> None:
    """Fails when: blocks behind an end are written, or one within a block that is not whole yet ends the text."""
    whole = denoise(model, [[5, *[MASK] * 12]], [0], Diffusion(MASK, False, 12), DenoisingSettings(block_length=4))[0]
    ended = denoise(model, [[5, *[MASK] * 12]], [0], Diffusion(MASK, False, 12), DenoisingSettings(block_length=4, end_token_ids=(whole[2],)))[0]
    assert ended[:5] == whole[:5]
    assert ended[5:] == [MASK] * 8
