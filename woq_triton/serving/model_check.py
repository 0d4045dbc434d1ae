"""What can be told of a model from its config and tokenizer, before any rank loads its weights."""

import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from woq_triton.serving.measure import eval_windows
from woq_triton.serving.options import GenerateOptions


def check_model(options: GenerateOptions) -> None:
    """Refuse a model that cannot generate what was asked for.

    Raises:
        ValueError: It is not there, is no causal language model, has no tokenizer, or is too short for the
            request; one line says which.
    """
    _check_place(options.model)
    try:
        from transformers import AutoConfig
        from transformers.utils import logging
    except ModuleNotFoundError as error:
        raise ValueError(f"generate needs {error.name!r}: pip install 'woq_triton[autotp]'") from None
    logging.set_verbosity_error()
    try:
        config = AutoConfig.from_pretrained(options.model, trust_remote_code=False)
    except Exception as error:  # Of many kinds: a field of the wrong type, an unknown model, ...
        raise ValueError(f"the config of --model {options.model} cannot be used: {_brief(error)}") from None
    _check_architecture(options.model, config)
    tokenize(options, _load_tokenizer(options.model), config)


def tokenize(options: GenerateOptions, tokenizer: Any, config: Any) -> tuple[Tensor, list[Tensor]]:
    """Token ids of the prompt, int64 ``[1, tokens]``, and the windows of the evaluation text, likewise.

    Raises:
        ValueError: The prompt has no tokens or too many, or the text too few.
    """
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    prompt_ids = tokenizer(options.prompt, return_tensors="pt").input_ids.long()
    tokens = prompt_ids.shape[1]
    if tokens == 0:
        raise ValueError(f"--prompt {options.prompt!r} has no tokens for this model; give more text")
    if context is not None and tokens + options.max_new_tokens > context:
        raise ValueError(
            f"--prompt has {tokens} tokens and --max-new-tokens is {options.max_new_tokens}, "
            f"together more than the model's {context} positions; shorten one of them"
        )
    text = Path(options.text_file).read_text(encoding="utf-8")
    ids = torch.tensor(tokenizer(text).input_ids[: options.eval_tokens])
    if len(ids) < 2:
        raise ValueError(
            f"--text {options.text_file} has {len(ids)} token(s), too few to predict one from another"
        )
    return prompt_ids, eval_windows(ids, context)


def _check_place(model: str) -> None:
    """Refuse what is neither a folder with a readable config.json nor a model of the Hub."""
    folder = Path(model)
    if folder.is_dir():
        config = folder / "config.json"
        try:
            json.loads(config.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ValueError(
                f"--model {model} is a folder without config.json, so no Hugging Face model"
            ) from None
        except (OSError, ValueError) as error:
            raise ValueError(f"{config} cannot be read: {error}") from None
        return
    if folder.exists():
        raise ValueError(f"--model {model} is a file; give the folder that holds config.json")
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", model):
        raise ValueError(f"--model {model} does not exist, and is no id such as org/name")
    _check_hub_model(model)


def _check_hub_model(model: str) -> None:
    """Fetch the config of a model of the Hub, which takes a moment, rather than fail on every rank."""
    try:
        from huggingface_hub import hf_hub_download
    except ModuleNotFoundError:
        raise ValueError(
            f"--model {model} is no folder, and loading from the Hub needs pip install 'woq_triton[autotp]'"
        ) from None
    try:
        hf_hub_download(model, "config.json")
    except Exception as error:  # Of many kinds: no network, no such model, no access, ...
        raise ValueError(
            f"--model {model} is no folder here, and could not be had from the Hugging Face Hub: "
            f"{_brief(error)}"
        ) from None


def _check_architecture(model: str, config: Any) -> None:
    """Refuse a model without a trained head for the next token: transformers would make up a random one.

    A checkpoint's config names the class it was saved from. Multimodal models whose text part generates are
    saved as `...ForConditionalGeneration`, as are encoder-decoders, which are no causal language models.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    loaded = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    architectures = list(config.architectures or [])
    name = architectures[0] if architectures else config.model_type
    endings = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
    with_head = any(saved == loaded or saved.endswith(endings) for saved in architectures)
    # A config that names no class leaves its type alone to go by.
    if loaded is None or config.is_encoder_decoder or (architectures and not with_head):
        raise ValueError(
            f"--model {model} is a {name} by its config.json; generate needs a causal language model with "
            "its head, such as a LlamaForCausalLM or GPT2LMHeadModel"
        )


def _load_tokenizer(model: str) -> Any:
    from transformers import AutoTokenizer

    folder = Path(model)
    try:
        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    except Exception as error:  # Of many kinds: a missing or broken file, a missing package, ...
        if folder.is_dir() and not any(folder.glob("*token*")) and not any(folder.glob("vocab*")):
            raise ValueError(_no_tokenizer(model)) from None
        raise ValueError(f"the tokenizer of --model {model} cannot be loaded: {_brief(error)}") from None
    # Some classes make an empty tokenizer where they find no file; others, of bytes, have no file.
    files = list(tokenizer.vocab_files_names.values())
    if folder.is_dir() and files and not any((folder / f).exists() for f in ["tokenizer.json", *files]):
        raise ValueError(_no_tokenizer(model))
    return tokenizer


def _no_tokenizer(model: str) -> str:
    return (
        f"--model {model} is a folder without a tokenizer: there is no tokenizer.json in it; "
        "copy that and tokenizer_config.json from where the model came from"
    )


def _brief(error: Exception) -> str:
    """The first line of an error, within what one can read at a glance."""
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__
