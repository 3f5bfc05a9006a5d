"""Turn a Hugging Face folder into a GGUF file with llama.cpp's own converter, patched to accept our tokenizers.

    LLAMA_ENV/bin/python bench/peers/convert_gguf.py LLAMA_CPP_SOURCE MODEL_FOLDER OUT.gguf f32|bf16|q8_0

The converter identifies tokenizers by a hash of their output and refuses unknown ones. The pre-tokenizer's name
matters for text, but not for speed or token ids, so every byte-level BPE is declared to be GPT-2's.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path


def main() -> None:
    source, (folder, out, kind) = Path(sys.argv[1]).resolve(), sys.argv[2:]
    sys.path[:0] = [str(source), str(source / "gguf-py")]
    sys.argv = ["convert_hf_to_gguf.py", folder, "--outtype", kind, "--outfile", out]
    base = __import__(
        "conversion.base", fromlist=["TextModel"]
    )  # Part of llama.cpp's source, not an installed package.
    base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
    runpy.run_path(str(source / "convert_hf_to_gguf.py"), run_name="__main__")


if __name__ == "__main__":
    main()
