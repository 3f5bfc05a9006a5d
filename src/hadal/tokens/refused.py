"""Checks that refuse tokenizer files for which Hadal would produce other ids than transformers.

Every field that transformers 5 reads is implemented (tokens/added, gateway/text/vocabulary),
refused here, or does not change the ids of a single text (lengths, padding, input names, decoding).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hadal.core.documents import shown
from hadal.core.errors import CheckpointError
from hadal.tokens.added import CONFIG, read_config

# fmt: off
OWN_PIPELINES = frozenset({
    "Albert", "Auto", "Bart", "Barthez", "Bartpho", "Basic", "Bert", "BertGeneration",
    "BertJapanese", "Bertweet", "BigBird", "BioGpt", "Blenderbot", "BlenderbotSmall", "ByT5",
    "CLIP", "CTRL", "Camembert", "Canine", "Character", "Clvp", "CodeGen", "CodeLlama",
    "Cohere", "ConvBert", "Cpm", "CpmAnt", "DPRContextEncoder", "DPRQuestionEncoder",
    "DPRReader", "Deberta", "DebertaV2", "Dia", "DistilBert", "Esm", "Esmc", "FNet", "FSMT",
    "FastSpeech2Conformer", "Flaubert", "Funnel", "GPT2", "GPTNeoX", "GPTNeoXJapanese",
    "GPTSw3", "Gemma", "Herbert", "LED", "Lasr", "LayoutLMv2", "LayoutLMv3", "LayoutXLM",
    "Luke", "Lxmert", "M2M100", "MBart", "MBart50", "MLuke", "MPNet", "Marian", "MarkupLM",
    "Mecab", "Mgpstr", "MobileBert", "Mvp", "MyT5", "Nllb", "Nougat", "OpenAIGPT", "PLBart",
    "Pegasus", "Perceiver", "Phobert", "Pop2Piano", "ProphetNet", "Qwen2", "Qwen3_5", "Rag",
    "Reformer", "RemBert", "RoCBert", "RoFormer", "Roberta", "SeamlessM4T", "Siglip", "Siglip2",
    "Speech2Text", "SpeechT5", "Splinter", "SqueezeBert", "T5", "Tapas", "Tipsv2", "Udop",
    "VideoPrism", "Vits", "Wav2Vec2CTC", "Wav2Vec2PhonemeCTC", "Whisper", "Wordpiece", "XGLM",
    "XLM", "XLMRoberta", "XLNet",
})
# fmt: on
"""Classes `<name>Tokenizer` of transformers 5.23 that build their own tokenizer and ignore
tokenizer.json. LlamaTokenizer is missing here, because transformers uses a byte-level
tokenizer.json for it, and other kinds are not supported.
"""
_BY_MODEL_TYPE = frozenset({"glm4_moe_lite"})
"""Model types for which transformers 5.23 uses tokenizer.json for any `tokenizer_class`
(TOKENIZER_MAPPING_NAMES).
"""


def check_files(folder: Path, fields: Mapping[str, Any], source: str) -> None:
    """Raise CheckpointError, which names file and field, for a tokenizer that cannot be reproduced.
    `fields`: content of tokenizer.json; `source`: name of that file.
    """
    config = read_config(folder)
    path = folder / CONFIG
    if config.get("split_special_tokens"):
        raise CheckpointError(
            f"{path}: split_special_tokens is {shown(config['split_special_tokens'])}; then prompts would have"
            " no special tokens. Set it to false."
        )
    if config.get("fix_mistral_regex"):
        raise CheckpointError(
            f"{path}: fix_mistral_regex is {shown(config['fix_mistral_regex'])}; it changes how"
            " tokenizer.json splits a text. Save the tokenizer with it, and set it to false."
        )
    files = config.get("fast_tokenizer_files")
    if files and files != ["tokenizer.json"]:
        raise CheckpointError(
            f"{path}: fast_tokenizer_files is {shown(files)}; only tokenizer.json is read. Rename the"
            " newest version's file to tokenizer.json, and remove the field."
        )
    _check_class(folder, config)
    model = fields["model"]
    if model.get("dropout"):
        raise CheckpointError(
            f"{source}: model.dropout is {shown(model['dropout'])}; equal texts would get different ids"
            " each time. Set it to null."
        )
    for part in _parts(fields.get("pre_tokenizer"), "pretokenizers"):
        if part.get("type") == "Metaspace":
            raise CheckpointError(
                f"{source}: pre_tokenizer has a Metaspace; only byte-level tokenizers are supported."
            )


def _check_class(folder: Path, config: Mapping[str, Any]) -> None:
    auto_map = config.get("auto_map")
    if isinstance(auto_map, list) or (isinstance(auto_map, dict) and auto_map.get("AutoTokenizer")):
        return  # The model's own code decides; its tokenizer.json should agree with it.
    model = read_config(folder, "config.json")
    kind, source = config.get("tokenizer_class"), folder / CONFIG
    if not kind:
        kind, source = model.get("tokenizer_class"), folder / "config.json"
    if not isinstance(kind, str) or model.get("model_type") in _BY_MODEL_TYPE:
        return
    name = kind.removesuffix("Fast").removesuffix("Tokenizer")
    if name in OWN_PIPELINES or kind in ("SentencePieceBackend", "MistralCommonBackend"):
        raise CheckpointError(
            f"{source}: tokenizer_class is {shown(kind)}, with which transformers builds a tokenizer"
            " other than tokenizer.json's. Set it to 'PreTrainedTokenizerFast' if tokenizer.json is"
            " right."
        )


def _parts(part: Any, name: str) -> Iterator[Mapping[str, Any]]:
    """Yield a part of the pipeline and, if it is a sequence, the parts listed under `name`."""
    queue = [part]
    while queue:
        each = queue.pop()
        if isinstance(each, dict):
            yield each
            parts = each.get(name)
            queue += parts if isinstance(parts, list) else []
