"""Rows of sound become what a model's own feature extractor makes of them, with what was said for its decoder."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from io import BytesIO
from pathlib import Path, PurePath
from typing import Any

import numpy
import torch
from numpy.typing import NDArray

from featcal_cli.data.batches import (
    OTHER_COLUMN,
    BadRowError,
    Batch,
    Reader,
    count_vocabulary,
    decoder_prompt,
    forward_names,
    load_feature_extractor,
)
from featcal_cli.data.cells import Row
from featcal_cli.data.columns import TRANSCRIPT_NAMES, Samples, find_audio_column
from featcal_cli.data.hub_dataset import first_line
from featcal_cli.data.local_files import folder_of
from featcal_cli.data.preprocessing import Target
from featcal_cli.data.rows import open_cell
from featcal_cli.data.vocabulary import TextTokens
from featcal_cli.recipe.schema import Data
from featcal_cli.runtime.errors import DataError
from featcal_cli.runtime.sanitise import list_some, plain, quoted

MOST_SECONDS = 30
"""Length of a recording that is read; the rest is cut off."""
SLOWEST, FASTEST = 1_000, 400_000
"""Samples a second that a recording may have."""
INSTALL = "install what reads sound, in the clone of featcal: pip install -e '.[audio]'"
Wave = NDArray[numpy.float32]


@dataclass(frozen=True)
class EncodedAudio:
    """A recording that can be decoded, but is not, and what is said in it."""

    value: Any
    """Its cell: bytes, a path, both, or numbers."""
    digest: bytes
    is_cut: bool
    samples: int
    tokens: list[int]
    """Ids of the text that the decoder is to write; empty where there is no text."""


@dataclass(frozen=True)
class AudioReader(Reader):
    """Sound through a model's own feature extractor; an item is the recording still encoded."""

    column: str
    folder: Path | None
    """The folder that relative paths start at, of a local source. None for a Hub dataset, whose rows name no files
    of this machine."""
    extractor: Any
    target: Target
    transcript: str | None
    """The column of what is said."""
    tokens: TextTokens | None
    """The tokens of that text."""

    def read(self, row: Row) -> EncodedAudio:
        wave, is_cut = self._decode(row.get(self.column))
        tokens: list[int] = []
        if self.transcript is not None:
            text = row.get(self.transcript)
            if not isinstance(text, str) or not text.strip():
                raise BadRowError(f"column {plain(self.transcript)} has no text", OTHER_COLUMN)
            tokens = self._encode(text)
        digest = sha256(repr(tokens).encode() + wave.tobytes()).digest()
        return EncodedAudio(row[self.column], digest, is_cut, len(wave), tokens)

    def key(self, item: EncodedAudio) -> bytes:
        return item.digest

    def longest(self, items: Sequence[EncodedAudio]) -> Sequence[EncodedAudio]:
        return [max(items, key=lambda item: item.samples), max(items, key=lambda item: len(item.tokens))]

    def remarks(self, items: Sequence[EncodedAudio]) -> list[str]:
        cut = sum(item.is_cut for item in items)
        beyond = f"{cut} of {len(items)} recordings are longer than {MOST_SECONDS} s: what is beyond is cut off"
        return [beyond] if cut else []

    @property
    def pads_to_longest(self) -> bool:
        """Whether recordings are padded to the longest of a batch; some extractors pad all to one length instead."""
        return inspect.signature(self.extractor.__call__).parameters["padding"].default is False

    def unpadded_length(self, item: EncodedAudio) -> int | None:
        """The number of samples where the extractor pads without a mask, so that the model would hear the padding."""
        has_mask = getattr(self.extractor, "return_attention_mask", True) and any(
            name.endswith("attention_mask") for name in forward_names(self.target.model)
        )
        return item.samples if self.pads_to_longest and not has_mask else None

    def batch(self, items: Sequence[EncodedAudio]) -> Batch:
        """The model's main input [examples, …], masks where the extractor makes some, and the decoder's input."""
        waves = [self._decode(item.value)[0] for item in items]
        options = {"sampling_rate": self.extractor.sampling_rate, "return_tensors": "pt"}
        if self.pads_to_longest:
            options["padding"] = True
        model = self.target.model
        extract = partial(self.extractor, waves, **options)
        batch = self.target.preprocess("recordings", extract, len(items), model.main_input_name)
        if self.transcript is None:
            return batch | decoder_prompt(model, len(items))
        return batch | {name: x for name, x in self._decoder_input(items).items() if name in forward_names(model)}

    def _decoder_input(self, items: Sequence[EncodedAudio]) -> Batch:
        """The text of the recordings, shifted to the right [examples, tokens], and its mask."""
        config, longest = self.target.model.config, max(len(item.tokens) for item in items)
        shifted = torch.full((len(items), longest), int(getattr(config, "pad_token_id", None) or 0))
        mask = torch.zeros_like(shifted)
        for row, item in enumerate(items):
            shifted[row, : len(item.tokens)] = torch.tensor([config.decoder_start_token_id, *item.tokens[:-1]])
            mask[row, : len(item.tokens)] = 1
        return {"decoder_input_ids": shifted, "decoder_attention_mask": mask}

    def _encode(self, text: str) -> list[int]:
        """The ids of what is said, in the vocabulary of the model that the batches are for."""
        assert self.tokens is not None
        most = getattr(self.target.model.config, "max_target_positions", None)
        ids = self.tokens.cutting.tokenizer(text, truncation=True, max_length=most)["input_ids"]
        self.tokens.check(ids, [text], most or len(ids))
        tokens = self.tokens.number(ids)
        if tokens[:1] == [self.target.model.config.decoder_start_token_id]:
            del tokens[0]  # the shift to the right begins with it
        if not tokens or max(tokens) >= (count_vocabulary(self.target.model) or max(tokens) + 1):
            raise BadRowError(f"column {plain(str(self.transcript))} has no text that the model knows", OTHER_COLUMN)
        return tokens

    def _decode(self, value: Any) -> tuple[Wave, bool]:
        """The recording as one channel at the extractor's rate, and whether it was longer than MOST_SECONDS."""
        try:
            rate, channels = self._read_samples(value)
            if not (isinstance(rate, int) and SLOWEST <= rate <= FASTEST):
                raise ValueError(f"{plain(str(rate))} samples a second are none that sound has")
            wave = channels[: MOST_SECONDS * rate].mean(1)
            if not len(wave) or not numpy.isfinite(wave).all():
                raise ValueError("it is empty" if not len(wave) else "some samples are NaN or infinite")
            import soxr

            resampled: Wave = soxr.resample(wave, rate, self.extractor.sampling_rate).astype(numpy.float32)
            return resampled, len(channels) > MOST_SECONDS * rate
        except BadRowError:
            raise
        except Exception as error:  # decoders raise many kinds for what is broken
            name = value.get("path") if isinstance(value, dict) else value
            which = f"the recording {quoted(PurePath(name).name)}" if isinstance(name, str) and name else "a recording"
            reason = plain(getattr(error, "error_string", first_line(error)))  # libsndfile's own words
            raise BadRowError(f"{which} in column {self.column} cannot be decoded ({reason})") from error

    def _read_samples(self, value: Any) -> tuple[Any, Wave]:
        """Samples a second, and so many of them as are heard and one more [samples, channels]."""
        import soundfile

        if isinstance(value, dict) and value.get("array") is not None:
            samples = numpy.asarray(value["array"], dtype=numpy.float32)
            if samples.ndim not in (1, 2):
                raise ValueError(f"an array of {list(samples.shape)} is no recording")
            channels = samples[:, None] if samples.ndim == 1 else samples
            return value.get("sampling_rate"), channels.T if channels.shape[0] < channels.shape[1] else channels
        source = open_cell(value, self.column, self.folder, "recording")
        with soundfile.SoundFile(BytesIO(source) if isinstance(source, bytes) else source) as file:
            rate = file.samplerate
            return rate, file.read(MOST_SECONDS * rate + 1, dtype="float32", always_2d=True)


def open_audio(data: Data, samples: Samples, target: Target) -> AudioReader:
    """The reader of rows of sound. Raises DataError when no column holds any, no folder has a feature extractor, or
    what reads sound is not installed."""
    column = data.columns.get("audio") or find_audio_column(samples, target.where)
    try:
        import soundfile  # noqa: F401
        import soxr  # noqa: F401
    except (ImportError, OSError) as error:  # OSError: without the C library
        raise DataError(f"sound cannot be read ({first_line(error)})", where=target.where, fix=INSTALL) from None
    extractor, source = load_feature_extractor(target.folders, target.where)
    chosen = f"column {column} (of {list_some(samples)}), feature extractor from {source}"
    transcript = None
    model = target.model
    if model.config.is_encoder_decoder and model.can_generate() and "decoder_input_ids" in forward_names(model):
        transcript = data.columns.get("response") or data.columns.get("text")
        transcript = transcript or next((name for name in TRANSCRIPT_NAMES if name in samples), None)
        chosen += f", {transcript} for the decoder" if transcript else ", no target for the decoder"
    tokens = None if transcript is None else target.open_tokens()
    return AudioReader(chosen, column, folder_of(data), extractor, target, transcript, tokens)
