"""Train the small Llama that the package ships, and write its whole folder.

The model exists so that `woq-triton generate` and the tests have a *trained* network at hand: only trained
weights show what quantization costs. It is a grouped-query Llama of 4.2 M parameters over a byte-level BPE of
2048 entries, trained from nothing on the King James Bible (1611, public domain), in under an hour on two CPU
cores. At tp 2 every shard boundary falls on a group boundary, for group sizes 32, 64 and 128 along the input
dimension (the key and value projections have 128 outputs, so along the output dimension for 32 and 64).

The text is Debian's, written one verse a line with its reference in front:

    apt-get install bible-kjv bible-kjv-text
    bible -f Gen1:1-Rev99:99 > kjv.txt
    python scripts/train_demo_model.py --text kjv.txt

Ruth and Jonah are held out (`eval.txt` in the folder). James and Joel are held out as well; they are what is
measured while training, so that no choice was made by looking at `eval.txt`. Interrupted training continues
from its last checkpoint. The same text, library versions, threads and type of machine give the same weights.
"""

import hashlib
import itertools
import math
import os
import re
import tempfile
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from tqdm import tqdm
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from woq_triton import QuantScheme, quantize

ROOT = Path(__file__).resolve().parent.parent
VERSE = re.compile(r"(?P<book>[1-3]?[A-Za-z]+)(?P<chapter>\d+):\d+ (?P<text>.+)")
EVAL_BOOKS = ("Ruth", "Jonah")
VALIDATION_BOOKS = ("Jas", "Joel")
START = "<|endoftext|>"  # the only special token: it opens every chapter
CONTEXT = 256
SCHEMES = [QuantScheme(bits, size) for bits, size in ((8, 64), (4, 32), (4, 64), (4, 128))]
PROMPT = "And the LORD said unto Moses,"

README = """# woq_triton demo model

A Llama of {parameters:,} parameters, stored in bfloat16: hidden {hidden}, {layers} layers, {heads} query
and {kv_heads} key/value heads of {head_dim}, MLP {mlp}, vocabulary {vocab}, context {context}, head not tied.
`scripts/train_demo_model.py` in the source repository made every file here. It is for showing and testing
quantization, and not to be relied on for anything it says.

It was trained for {steps} steps of {batch} windows of {context} tokens: {passes:.1f} passes over {tokens:,}
tokens.

| weights | perplexity a token on `eval.txt` |
| --- | --- |
{perplexities}

Perplexity is measured in float32 over windows of {context} tokens side by side; a uniform guess has {vocab}.
Quantized are all linear layers, the embedding and the head, group_dim 1, asymmetric. As stored, the model
needs {bits:.2f} bits a character. "{prompt}" continues, greedily:

> {sample}

## Text and licence

Trained on the King James Version of the Bible (1611) as Debian's package `bible-kjv-text` holds it; the
copyright in that text has expired. Ruth and Jonah were held out of the training and are `eval.txt`; James and
Joel were held out as well, to watch the training by. The model is offered under the Apache License 2.0, like
the package.
"""


@dataclass(frozen=True)
class Recipe:
    """What decides the result of the training, besides the text."""

    steps: int = 3000
    batch_size: int = 8
    warmup_steps: int = 200
    peak_lr: float = 3e-3
    final_lr: float = 6e-5
    weight_decay: float = 0.1
    seed: int = 1611

    def lr(self, step: int) -> float:
        """Linear warm-up to `peak_lr`, then half a cosine down to `final_lr`."""
        if step < self.warmup_steps:
            return self.peak_lr * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        return self.final_lr + (self.peak_lr - self.final_lr) * 0.5 * (1 + math.cos(math.pi * progress))


def read_chapters(path: Path) -> dict[str, list[str]]:
    """Read `bible -f` output: book -> its chapters, each with one verse a line.

    Raises:
        typer.BadParameter: a line has no reference, or a held-out book is missing.
    """
    books: dict[str, dict[str, str]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        match = VERSE.fullmatch(line.rstrip())
        if match is None:
            raise typer.BadParameter(
                f"{path}, line {number}: expected 'Ge1:1 In the beginning ...', found {line[:60]!r}. "
                "Write the file with: bible -f Gen1:1-Rev99:99"
            )
        chapters = books.setdefault(match["book"], {})
        chapters[match["chapter"]] = chapters.get(match["chapter"], "") + match["text"] + "\n"
    missing = [book for book in EVAL_BOOKS + VALIDATION_BOOKS if book not in books]
    if missing:
        raise typer.BadParameter(f"{path} lacks the held-out books {missing}; it must hold the whole text")
    return {book: list(chapters.values()) for book, chapters in books.items()}


def train_tokenizer(chapters: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE that puts `START` in front of what it encodes, and loses no byte."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[START],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(chapters, trainer)
    bpe.post_processor = processors.TemplateProcessing(
        single=f"{START} $A", special_tokens=[(START, bpe.token_to_id(START))]
    )
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=START, eos_token=START, pad_token=START)


def llama_config(vocab_size: int) -> LlamaConfig:
    """A Llama with grouped queries, whose shards at tp 2 are whole groups of 32, 64 or 128 inputs."""
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=None,  # torch does not train the embedding of a padding token, and ours would be START
    )


def batches(stream: torch.Tensor, recipe: Recipe, first_step: int) -> Iterator[torch.Tensor]:
    """Endless `[batch_size, CONTEXT]` int64 batches of a token stream, the same for the same step.

    Each pass cuts the stream into windows at a fresh random offset and goes through all of them once.
    """
    per_pass = (len(stream) // CONTEXT - 1) // recipe.batch_size
    for step in itertools.count(first_step):
        current_pass, index = divmod(step, per_pass)
        generator = torch.Generator().manual_seed(recipe.seed + current_pass)
        offset = int(torch.randint(CONTEXT, (), generator=generator))
        order = torch.randperm(len(stream) // CONTEXT - 1, generator=generator)
        starts = order[index * recipe.batch_size : (index + 1) * recipe.batch_size] * CONTEXT + offset
        yield torch.stack([stream[start : start + CONTEXT] for start in starts.tolist()])


@torch.no_grad()
def mean_nll(model: LlamaForCausalLM, ids: torch.Tensor) -> float:
    """Mean negative log-likelihood in nats a token, `ids` int64 `[tokens]`, in windows side by side."""
    total, count = 0.0, 0
    for window in torch.split(ids, CONTEXT):
        if len(window) > 1:
            total += float(model(input_ids=window[None], labels=window[None]).loss) * (len(window) - 1)
            count += len(window) - 1
    return total / count


def write_atomically(path: Path, state: dict[str, Any]) -> None:
    """Save under a temporary name, then rename: an interruption leaves the previous file whole."""
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    os.replace(partial, path)


def train(
    model: LlamaForCausalLM,
    stream: torch.Tensor,
    validation: torch.Tensor,
    recipe: Recipe,
    checkpoint: Path,
    fingerprint: str,
) -> None:
    """Train in place: AdamW, bf16 autocast over fp32 weights, continuing from `checkpoint` if it fits.

    Args:
        model: fp32 model, changed in place.
        stream: int64 `[tokens]`, the training text.
        validation: int64 `[tokens]`, measured now and then for the progress bar alone.
        recipe: the numbers of the training.
        checkpoint: file that is rewritten every 200 steps.
        fingerprint: names text and recipe; a checkpoint with another one is refused.
    """
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
        fused=True,
    )
    first_step = 0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        if state["fingerprint"] != fingerprint:
            raise typer.BadParameter(f"{checkpoint} is from another text or recipe; remove it, or set --work")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first_step = state["step"]

    bar = tqdm(total=recipe.steps, initial=first_step, unit="step", smoothing=0.05)
    smoothed, shown = 0.0, ""
    for step, batch in zip(
        range(first_step, recipe.steps), batches(stream, recipe, first_step), strict=False
    ):
        for group in optimizer.param_groups:
            group["lr"] = recipe.lr(step)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

        smoothed = loss.item() if step == first_step else 0.98 * smoothed + 0.02 * loss.item()
        done = step + 1
        if done % 200 == 0 or done == recipe.steps:
            shown = f", held out {math.exp(mean_nll(model, validation)):.1f}"
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": done}
            write_atomically(checkpoint, {**state, "fingerprint": fingerprint})
            bar.write(f"step {done}: perplexity {math.exp(smoothed):.1f}{shown}")
        bar.set_postfix_str(f"perplexity {math.exp(smoothed):.1f}{shown}", refresh=False)
        bar.update()
    bar.close()


@torch.no_grad()
def perplexity_quantized(model: LlamaForCausalLM, ids: torch.Tensor, scheme: QuantScheme) -> float:
    """Perplexity of `ids` (int64 `[tokens]`) with every matrix quantized as bf16, computed with in fp32."""
    copy = deepcopy(model)
    for parameter in copy.parameters():
        if parameter.dim() == 2:
            parameter.copy_(quantize(parameter.to(torch.bfloat16), scheme).dequantize(torch.float32))
    return math.exp(mean_nll(copy, ids))


def continue_greedily(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, prompt: str) -> str:
    """Continue `prompt` by the 48 likeliest tokens, one after the other."""
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    with torch.no_grad():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=48, do_sample=False)
    return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))


def write_folder(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    eval_text: str,
    recipe: Recipe,
    training_tokens: int,
    output: Path,
) -> None:
    """Round the weights to bf16, measure them as stored, and write everything that ships."""
    model.to(torch.bfloat16).float().eval()  # stored as bf16, computed with in fp32
    eval_ids = torch.tensor(tokenizer(eval_text).input_ids)
    nll = mean_nll(model, eval_ids)
    perplexities = {"bfloat16, as stored": math.exp(nll)}
    for scheme in SCHEMES:
        name = f"int{scheme.num_bits} g{scheme.group_size}"
        perplexities[name] = perplexity_quantized(model, eval_ids, scheme)
    sample = continue_greedily(model, tokenizer, PROMPT)
    config = model.config
    model.generation_config = GenerationConfig(
        do_sample=False, bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=0
    )
    readme = README.format(
        parameters=model.num_parameters(),
        hidden=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        mlp=config.intermediate_size,
        vocab=config.vocab_size,
        context=CONTEXT,
        steps=recipe.steps,
        batch=recipe.batch_size,
        tokens=training_tokens,
        passes=recipe.steps * recipe.batch_size * CONTEXT / training_tokens,
        perplexities="\n".join(f"| {name} | {value:.3f} |" for name, value in perplexities.items()),
        bits=nll / math.log(2) * (len(eval_ids) - 1) / len(eval_text),
        prompt=PROMPT,
        sample=sample.strip().replace("\n", "\n> "),
    )

    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent) as partial:
        model.to(torch.bfloat16).save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        (Path(partial) / "eval.txt").write_text(eval_text, encoding="utf-8")
        (Path(partial) / "README.md").write_text(readme, encoding="utf-8")
        for file in Path(partial).iterdir():
            file.chmod(0o644)
            os.replace(file, output / file.name)
    size = sum(file.stat().st_size for file in output.iterdir())
    typer.echo(f"wrote {output}, {size / 1e6:.1f} MB; perplexity on eval.txt:")
    for name, perplexity in perplexities.items():
        typer.echo(f"  {name}: {perplexity:.3f} ({perplexity / math.exp(nll) - 1:+.2%})")
    typer.echo(f"{PROMPT}{sample}")


def main(
    text: Annotated[
        Path, typer.Option(exists=True, dir_okay=False, help="Output of bible -f Gen1:1-Rev99:99.")
    ],
    output: Annotated[Path, typer.Option(help="Folder to write.")] = ROOT / "woq_triton" / "demo_model",
    work: Annotated[Path, typer.Option(help="Folder for the checkpoint.")] = ROOT / "out" / "demo_model",
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = Recipe.steps,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads; 2 made the shipped model.")] = 2,
) -> None:
    """Train the demo model on the King James Bible and write the folder that the package ships."""
    recipe = Recipe(steps=steps)
    torch.set_num_threads(threads)
    torch.manual_seed(recipe.seed)

    books = read_chapters(text)
    held_out = EVAL_BOOKS + VALIDATION_BOOKS
    chapters = [chapter for book, parts in books.items() if book not in held_out for chapter in parts]
    eval_text = "".join(chapter for book in EVAL_BOOKS for chapter in books[book])
    validation_text = "".join(chapter for book in VALIDATION_BOOKS for chapter in books[book])

    tokenizer = train_tokenizer(chapters, vocab_size=2048)
    stream = torch.tensor(list(itertools.chain.from_iterable(tokenizer(chapters).input_ids)))
    validation = torch.tensor(tokenizer(validation_text).input_ids)

    config = llama_config(len(tokenizer))
    # Plain matmuls run faster than fused attention for windows this short on a CPU under autocast.
    model = LlamaForCausalLM._from_config(config, attn_implementation="eager")
    typer.echo(f"{model.num_parameters():,} parameters, {len(stream):,} tokens to train on")

    work.mkdir(parents=True, exist_ok=True)
    fingerprint = hashlib.sha256(text.read_bytes() + repr((recipe, config.to_dict())).encode()).hexdigest()
    train(model, stream, validation, recipe, work / "checkpoint.pt", fingerprint)

    write_folder(model, tokenizer, eval_text, recipe, len(stream), output)


if __name__ == "__main__":
    typer.run(main)
