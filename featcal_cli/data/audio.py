"""Turn recordings into model inputs by the model's own feature extractor, with the transcript for a decoder."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

from featcal_cli.data.batches import BadRowError, Example, decoder_inputs, padding_id
from featcal_cli.data.cells import Row, decode_cell
from featcal_cli.data.columns import NAMES, Samples, find_column
from featcal_cli.data.loading import load_preprocessor
from featcal_cli.data.local_files import folder_of
from featcal_cli.data.messages import is_text
from featcal_cli.data.preprocessing import Reader, Target
from featcal_cli.data.text import MAX_TOKENS
from featcal_cli.data.vocabulary import TextTokens, open_tokens
from featcal_cli.recipe.schema import Data
from featcal_cli.runtime.errors import DataError
from featcal_cli.runtime.sanitise import exception_text, list_some, plain

MOST_SECONDS = 30
"""Number of seconds of a recording that are read; the rest is cut off."""
INSTALL = {"fix": "install what reads sound, in the clone of featcal", "command": "pip install -e '.[audio]'"}
Wave = NDArray[numpy.float32]


@dataclass(frozen=True)
class AudioReader(Reader):
    """Turns recordings into model inputs with the model's own feature extractor."""

    column: str
    folder: Path | None
    """The folder that relative paths of a local source start from. None for a Hub dataset, because its rows may not
    name files on this machine."""
    extractor: Any
    target: Target
    transcript: str | None
    """The column with the transcript; None if there is none."""
    tokens: TextTokens | None
    """The tokens of the transcripts."""

    def read(self, row: Row) -> Example:
        model = self.target.model
        wave = decode_cell(row.get(self.column), self.column, self.folder, "recording", self._decode)
        extract = partial(self.extractor, [wave], sampling_rate=self.extractor.sampling_rate, return_tensors="pt")
        inputs = self.target.preprocess(model.main_input_name, extract)
        return Example(inputs | decoder_inputs(model, self._encode(row)))

    def _encode(self, row: Row) -> list[int]:
        """Return the token ids of a row's transcript, in the vocabulary of the model that the examples are for, or an
        empty list if the decoder gets no text. Raises BadRowError."""
        if self.transcript is None or self.tokens is None:
            return []
        text, config = row.get(self.transcript), self.target.model.config
        if not is_text(text):
            raise BadRowError(f"column {plain(self.transcript)} has no text")
        tokens = self.tokens.encode([text], getattr(config, "max_target_positions", MAX_TOKENS))["input_ids"]
        self.target.check_ids(tokens, is_target=True)
        if tokens[:1] == [config.decoder_start_token_id]:
            del tokens[0]  # the shift to the right begins with it
        if not tokens:
            raise BadRowError("a text has no tokens")
        return tokens

    def _decode(self, source: BytesIO | Path) -> Wave:
        """Return a recording as one channel at the extractor's rate. Raises what the libraries raise."""
        import soundfile
        import soxr

        with soundfile.SoundFile(source) as file:
            rate = file.samplerate
            wave = file.read(MOST_SECONDS * rate, dtype="float32", always_2d=True).mean(1)
        if not len(wave) or not numpy.isfinite(wave).all():
            raise ValueError("it is empty" if not len(wave) else "some samples are NaN or infinite")
        resampled: Wave = soxr.resample(wave, rate, self.extractor.sampling_rate).astype(numpy.float32)
        return resampled


def open_audio(data: Data, samples: Samples, target: Target) -> AudioReader:
    """Open the reader for rows with recordings. Raises DataError when no column holds recordings, no folder has a
    feature extractor, or the libraries that decode sound are not installed."""
    column = find_column("audio", data, samples, target.where)
    try:
        import soundfile  # noqa: F401
        import soxr  # noqa: F401
    except (ImportError, OSError) as error:  # OSError: without the C library
        raise DataError(f"sound cannot be read ({exception_text(error)})", where=target.where, **INSTALL) from None
    extractor, source = load_preprocessor("feature extractor", target.folders, target.where)
    chosen = f"column {column} (of {list_some(samples)}), feature extractor from {source}"
    transcript = None
    if target.model.config.is_encoder_decoder and target.model.can_generate() and "decoder_input_ids" in target.names:
        transcript = data.columns.get("response") or data.columns.get("text")
        transcript = transcript or next((name for name in NAMES["transcript"] if name in samples), None)
        chosen += f", {transcript} for the decoder" if transcript else ", no target for the decoder"
    tokens = open_tokens(target.text_models, target.folders, target.where) if transcript else None
    return AudioReader(chosen, padding_id(target.model), column, folder_of(data), extractor, target, transcript, tokens)
