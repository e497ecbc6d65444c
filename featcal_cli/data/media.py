"""Turn images and recordings into model inputs by the model's own preprocessor, also with a text beside them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray
from PIL import Image, ImageOps

from featcal_cli.data.batches import Batch, Example, count_positions, decoder_inputs
from featcal_cli.data.columns import (
    BadRowError,
    Message,
    Samples,
    choose_text_roles,
    find_about,
    find_column,
    find_usual,
    is_text,
    name_among,
)
from featcal_cli.data.files import folder_of
from featcal_cli.data.preprocessing import (
    MAX_TOKENS,
    Reader,
    Target,
    TextTokens,
    Vocabulary,
    load_preprocessor,
    open_tokens,
    renumber,
)
from featcal_cli.data.rows import decode_cell
from featcal_cli.data.text import RowFormatter, TextReader, open_text
from featcal_cli.recipe.data_formats import Row
from featcal_cli.recipe.schema import Data
from featcal_cli.runtime.errors import DataError
from featcal_cli.runtime.sanitise import exception_text, plain

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""Formats that are decoded. Pillow knows more, but for one of them, PostScript, it would run an external program."""
DEEP_MODES = ("I", "F")
"""Beginnings of the modes with more than 8 bits a pixel, which Pillow would clip instead of scaling them."""


@dataclass(frozen=True)
class MediaReader(Reader):
    """Turns the files of one column into model inputs with the model's own image processor or feature extractor."""

    column: str
    folder: Path | None
    """The folder that files named in rows lie in. None for a Hub dataset, whose rows may name none."""
    processor: Any
    transcript: str | None
    """The column of what the decoder writes."""
    tokens: TextTokens | None

    def decoder_inputs(self, row: Row) -> Batch:
        """Return the inputs of the decoder that writes a row's transcript, or that gets no text. Raises BadRowError."""
        if self.transcript is None or self.tokens is None:
            return decoder_inputs(self.target.model, ())
        text, config = row.get(self.transcript), self.target.model.config
        if not is_text(text):
            raise BadRowError(f"column {plain(self.transcript)} has no text")
        most = min(self.target.max_length or MAX_TOKENS, getattr(config, "max_target_positions", None) or MAX_TOKENS)
        tokens = self.tokens.encode([text], most)["input_ids"]
        self.target.check_ids(tokens, is_target=True)
        if tokens[:1] == [config.decoder_start_token_id]:
            del tokens[0]  # the shift to the right begins with it
        if not tokens:
            raise BadRowError("a text has no tokens")
        return decoder_inputs(self.target.model, tokens)


class ImageReader(MediaReader):
    def read(self, row: Row) -> Example:
        process = partial(self.processor, images=[self.picture(row)], return_tensors="pt")
        return Example(self.target.preprocess("pixel_values", process) | self.decoder_inputs(row))

    def picture(self, row: Row) -> Image.Image:
        value = row.get(self.column)
        if isinstance(value, list):
            if len(value) > 1:
                fix = "give rows with one image, or name the column of one: --columns TASK=image:COLUMN"
                raise BadRowError(f"it has {len(value)} images, and only one per row is read", fix)
            value = value[0] if value else None
        config = self.target.model.config
        is_gray = getattr(getattr(config, "vision_config", config), "num_channels", 3) == 1
        decode = partial(_decode, mode="L" if is_gray else "RGB")
        return decode_cell(value, self.column, self.folder, "image", decode)


def _decode(source: BytesIO | Path, *, mode: str) -> Image.Image:
    """Return an image's first frame in Pillow's `mode`, turned as its EXIF data say. Raises what Pillow raises, and
    ValueError."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what is lost with an image's transparency
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        image = Image.open(source, formats=FORMATS)
        if image.mode.startswith(DEEP_MODES):
            raise ValueError(f"its pixels are not 8-bit colours, but of mode {image.mode}")
        image.getexif()  # which Pillow keeps, and would write again: that fails where any of it is malformed
        image.info.pop("exif", None)
        return ImageOps.exif_transpose(image).convert(mode)


def open_images(
    data: Data, samples: Samples, target: Target, *, processor: tuple[Any, str] | None = None
) -> ImageReader:
    """Open the reader for rows with images, by default with an image processor that is loaded. Raises DataError."""
    column = find_column("image", data, samples)
    images, source = processor or load_preprocessor("image processor", target.folders)
    transcript, tokens, told = (None, None, "") if processor else _find_transcript(data, samples, target)
    chosen = f"column {name_among(column, samples)}, image processor from {source}{told}"
    return ImageReader(chosen, target, column, folder_of(data), images, transcript, tokens)


def _find_transcript(data: Data, samples: Samples, target: Target) -> tuple[str | None, TextTokens | None, str]:
    """Return the column of what the model's decoder writes, with the tokens that it knows; None if it has no decoder or
    no column does. The third is what the user is told."""
    if not (
        target.model.config.is_encoder_decoder and target.model.can_generate() and "decoder_input_ids" in target.names
    ):
        return None, None, ""
    named = data.columns.get("response") or data.columns.get("text")
    if transcript := named or next(iter(find_usual("transcript", samples)), None):
        return transcript, open_tokens(target.text_models, target.folders), f", {transcript} for the decoder"
    return None, None, ", no target for the decoder"


MOST_SECONDS = 30
"""Number of seconds of a recording that are read; the rest is cut off."""
INSTALL = {"fix": "install what reads sound, in the clone of featcal", "command": "pip install -e '.[audio]'"}
Wave = NDArray[numpy.float32]


class AudioReader(MediaReader):
    def read(self, row: Row) -> Example:
        wave = decode_cell(row.get(self.column), self.column, self.folder, "recording", self._decode)
        extract = partial(self.processor, [wave], sampling_rate=self.processor.sampling_rate, return_tensors="pt")
        inputs = self.target.preprocess(self.target.main_input, extract)
        self.target.check_length(inputs)
        return Example(inputs | self.decoder_inputs(row))

    def _decode(self, source: BytesIO | Path) -> Wave:
        """Return a recording as one channel at the extractor's rate. Raises what the libraries raise."""
        import soundfile
        import soxr

        with soundfile.SoundFile(source) as file:
            rate = file.samplerate
            wave = file.read(MOST_SECONDS * rate, dtype="float32", always_2d=True).mean(1)
        if not len(wave) or not numpy.isfinite(wave).all():
            raise ValueError("it is empty" if not len(wave) else "some samples are NaN or infinite")
        resampled: Wave = soxr.resample(wave, rate, self.processor.sampling_rate).astype(numpy.float32)
        return resampled


def open_audio(data: Data, samples: Samples, target: Target) -> AudioReader:
    """Open the reader for rows with recordings. Raises DataError, also for libraries that are not installed."""
    column = find_column("audio", data, samples)
    try:
        import soundfile  # noqa: F401
        import soxr  # noqa: F401
    except (ImportError, OSError) as error:  # OSError: without the C library
        raise DataError(f"sound cannot be read ({exception_text(error)})", **INSTALL) from None
    extractor, source = load_preprocessor("feature extractor", target.folders)
    transcript, tokens, told = _find_transcript(data, samples, target)
    chosen = f"column {name_among(column, samples)}, feature extractor from {source}{told}"
    return AudioReader(chosen, target, column, folder_of(data), extractor, transcript, tokens)


MARK = "<image>"
"""Placeholder that datasets write into a text in place of its image."""


@dataclass(frozen=True)
class PairReader(Reader):
    images: ImageReader
    texts: TextReader

    def read(self, row: Row) -> Example:
        return Example(self.images.read(row).inputs | self.texts.read(row).inputs)


@dataclass(frozen=True)
class DialogueReader(Reader):
    """Turns rows into an image and a text about it, both processed by the processor of a model that generates text."""

    images: ImageReader
    formatter: RowFormatter
    processor: Any
    tokens: TextTokens

    def count_tokens(self, example: Example) -> int:
        return example.inputs["input_ids"].numel()

    def read(self, row: Row) -> Example:
        text, token = self.formatter.compose(row).text, str(self.processor.image_token)
        text = text if token in text else f"{token}\n{text.replace(MARK, '').strip()}"
        if text.count(token) > 1:
            what = f"its text refers to {text.count(token)} images, and only one per row is read"
            raise BadRowError(what, "give rows with one image")
        picture = self.images.picture(row)
        process = partial(self.processor, images=[picture], text=[text], return_tensors="pt")
        inputs = self.target.preprocess("input_ids", process)
        ids, image = inputs["input_ids"][0].tolist(), self.processor.tokenizer.convert_tokens_to_ids(token)
        most_words = self.target.most_tokens(self.processor.tokenizer)
        most = min(most_words + ids.count(image), count_positions(self.target.model)[0] or len(ids))
        if len(ids) > most:
            per_token = [name for name, x in inputs.items() if x.shape[:2] == inputs["input_ids"].shape]
            inputs |= {name: inputs[name][:, :most] for name in per_token}
            if image in ids[most:]:
                raise BadRowError(f"its image does not end within {most} tokens")
        if self.tokens.others:
            self.tokens.check(self.processor.tokenizer(text)["input_ids"], [text], most_words)
        inputs = renumber(inputs, self.tokens.table)
        self.target.check_ids(inputs["input_ids"][0].tolist())
        return Example(inputs)


@dataclass(frozen=True)
class _Turns:
    """A processor's chat template as a tokenizer for RowFormatter; the image comes before the first question."""

    processor: Any
    chat_template: str | None

    def apply_chat_template(self, messages: Sequence[Message], **options: Any) -> str:
        asked = next((number for number, message in enumerate(messages) if message["role"] == "user"), 0)
        turns = []
        for number, message in enumerate(messages):
            content = message["content"]
            if isinstance(content, str):
                content = [{"type": "text", "text": content.replace(MARK, "").strip()}]
            parts = [part for part in content if part.get("type") != "image"]
            turns.append({**message, "content": [{"type": "image"}, *parts] if number == asked else parts})
        return str(self.processor.apply_chat_template(turns, **options))


def open_pairs(data: Data, samples: Samples, target: Target) -> PairReader:
    """Open the reader for a model with two towers. Raises DataError like `open_images` and `open_text`."""
    images = open_images(data, samples, target)
    texts = open_text(data, _without(samples, images.column), target)
    return PairReader(f"{images.chosen}; {texts.chosen}", target, images, texts)


def open_dialogues(data: Data, samples: Samples, target: Target) -> DialogueReader:
    """Open the reader for a causal model that answers about an image. Raises DataError."""
    processor, source = load_preprocessor("processor", target.folders)
    images = open_images(data, samples, target, processor=(processor.image_processor, source))
    others = _without(samples, images.column)
    roles = choose_text_roles(data, others, "causal", chat=bool(processor.chat_template))
    formatter = RowFormatter(
        roles, find_about(data, roles, others), data.template, "causal", _Turns(processor, processor.chat_template)
    )
    chosen = f"{images.chosen}; {formatter.describe(others)}, processor from {source}"
    cutting = Vocabulary("processor", source, processor.tokenizer, processor.tokenizer.get_vocab())
    return DialogueReader(chosen, target, images, formatter, processor, target.text_models.relate(cutting))


def _without(samples: Samples, column: str) -> Mapping[str, Sequence[Any]]:
    return {name: values for name, values in samples.items() if name != column}
