"""Rows of sound become what a model's own feature extractor makes of them, wherever they lie and however they are
stored."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pyarrow
import pyarrow.parquet
import pytest
import soundfile
import torch
import transformers
from command_line import featcal
from scipy.signal import resample_poly
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.whisper.modeling_whisper import shift_tokens_right

from featcal_cli.data.batches import Batch
from featcal_cli.data.examples import TaskExamples, draw_examples
from featcal_cli.recipe.schema import Data
from featcal_cli.runtime.errors import DataError

RATE = 16_000
WORDS = ["[PAD]", "[UNK]", "<start>", "<end>", "one", "two", "three"]
HEARING: dict[str, Any] = {
    "vocab_size": len(WORDS), "num_mel_bins": 8, "d_model": 16, "encoder_layers": 2, "decoder_layers": 1,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32,
    "max_source_positions": 50, "max_target_positions": 8, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3,
    "decoder_start_token_id": 2,
}  # fmt: skip
SOUNDING: dict[str, Any] = {
    "vocab_size": 8, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
    "conv_dim": (8, 8), "conv_kernel": (10, 4), "conv_stride": (20, 8), "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2, "do_stable_layer_norm": True, "feat_extract_norm": "layer",
}  # fmt: skip


def tone(number: int, seconds: float = 0.1, rate: int = RATE) -> Any:
    """A recording [samples], another one for each number."""
    time = numpy.arange(int(seconds * rate)) / rate
    return (0.5 * numpy.sin(2 * numpy.pi * (200 + 20 * number) * time)).astype(numpy.float32)


def encoded(wave: Any, rate: int = RATE, kind: str = "WAV", subtype: str | None = "FLOAT") -> bytes:
    soundfile.write(file := io.BytesIO(), wave, rate, format=kind, subtype=subtype)
    return file.getvalue()


def make_model(kind: str, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    built: Any = transformers
    if kind == "whisper":
        model: PreTrainedModel = built.WhisperForConditionalGeneration(built.WhisperConfig(**HEARING))
    else:
        model = built.Wav2Vec2ForCTC(built.Wav2Vec2Config(**SOUNDING))
    return model


def prepare(folder: Path, kind: str) -> PreTrainedModel:
    """A model, with what reads sound in the folder of merged."""
    built: Any = transformers
    if kind == "whisper":
        built.WhisperFeatureExtractor(feature_size=8, chunk_length=1).save_pretrained(folder / "merged")
        tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, "[UNK]"))
        tokenizer.pre_tokenizer = Whitespace()
        tokenizer.post_processor = TemplateProcessing("<start> $A <end>", special_tokens=[("<start>", 2), ("<end>", 3)])
        fast: Any = PreTrainedTokenizerFast
        fast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(folder / "merged")
    else:
        built.Wav2Vec2FeatureExtractor(return_attention_mask=True).save_pretrained(folder / "merged")
    return make_model(kind)


def draw(folder: Path, model: PreTrainedModel, source: Path, **keys: Any) -> TaskExamples:
    data = Data(path=str(source), **keys)
    return draw_examples("speech", data, model, [folder / "merged"], count=4, seed=0).cut(4)


def write_parquet(file: Path, rows: list[dict[str, Any]]) -> Path:
    arrow: Any = pyarrow
    arrow.parquet.write_table(arrow.Table.from_pylist(rows), file)
    return file


def as_bytes(folder: Path, waves: list[Any]) -> Path:
    rows = [{"audio": {"bytes": encoded(x), "path": f"{n}.wav"}, "id": n} for n, x in enumerate(waves)]
    return write_parquet(folder / "rows.parquet", rows)


def as_folder(folder: Path, waves: list[Any]) -> Path:
    for number, wave in enumerate(waves):
        place = folder / "sounds" / ("low" if number < 4 else "high")
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{number}.flac").write_bytes(encoded(wave, kind="FLAC", subtype="PCM_24"))
    return folder / "sounds"


def as_paths(folder: Path, waves: list[Any]) -> Path:
    as_folder(folder, waves)
    rows = [{"file": str(file.relative_to(folder)), "name": "x"} for file in sorted(folder.rglob("*.flac"))]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder / "rows.jsonl"


@pytest.mark.parametrize("store", [as_bytes, as_folder, as_paths], ids=lambda store: store.__name__)
def test_recordings_are_what_the_extractor_makes_of_them(
    tmp_path: Path, store: Callable[[Path, list[Any]], Path]
) -> None:
    model = prepare(tmp_path, "wav2vec2")
    waves = [tone(number, 0.1 + 0.01 * number) for number in range(8)]
    (batch,) = draw(tmp_path, model, store(tmp_path, waves)).fitted
    extractor: Any = transformers.AutoFeatureExtractor.from_pretrained(tmp_path / "merged")
    expected = {len(wave): extractor(wave, sampling_rate=RATE)["input_values"][0] for wave in waves}
    assert batch["input_values"].shape == batch["attention_mask"].shape
    for values, mask in zip(batch["input_values"], batch["attention_mask"], strict=True):
        length = int(mask.sum())
        assert torch.allclose(values[:length], torch.tensor(expected[length]), atol=1e-4)
        assert not values[length:].any()


def test_other_rates_and_channels_become_the_extractors(tmp_path: Path) -> None:
    model = prepare(tmp_path, "wav2vec2")
    slow = [numpy.stack([tone(n, 0.2, 8_000), tone(n + 40, 0.2, 8_000)], 1) for n in range(4)]
    rows = [{"audio": {"bytes": encoded(x, 8_000), "path": None}} for x in slow]
    batch = draw(tmp_path, model, write_parquet(tmp_path / "rows.parquet", rows)).fitted[0]
    extractor: Any = transformers.AutoFeatureExtractor.from_pretrained(tmp_path / "merged")
    doubled = [extractor(resample_poly(x.mean(1), 2, 1), sampling_rate=RATE)["input_values"][0] for x in slow]
    for values in batch["input_values"]:  # other filters differ at the edges
        inner = slice(200, len(values) - 200)
        nearest = min(float((values[inner] - torch.tensor(x)[inner]).abs().max()) for x in doubled)
        assert nearest < 0.02


def test_what_is_said_goes_to_the_decoder(tmp_path: Path) -> None:
    model = prepare(tmp_path, "whisper")
    texts = ["one two", "three", "two two one", "one"]
    rows = [{"audio": {"bytes": encoded(tone(n)), "path": ""}, "sentence": text} for n, text in enumerate(texts)]
    examples = draw(tmp_path, model, write_parquet(tmp_path / "rows.parquet", rows))
    (batch,) = examples.fitted
    assert batch["input_features"].shape == (4, 8, 100)
    assert any("sentence for the decoder" in note for note in examples.notes)
    of_text = {text: [WORDS.index(word) for word in text.split()] + [3] for text in texts}
    for ids, mask in zip(batch["decoder_input_ids"], batch["decoder_attention_mask"], strict=True):
        text = " ".join(WORDS[i] for i in ids[1 : int(mask.sum())])
        labels = torch.tensor([of_text[text]])
        assert torch.equal(ids[: int(mask.sum())], shift_tokens_right(labels, 0, 2)[0])
        assert not ids[int(mask.sum()) :].any()
    for row in rows:
        del row["sentence"]
    batch = draw(tmp_path, model, write_parquet(tmp_path / "silent.parquet", rows)).fitted[0]
    assert batch["decoder_input_ids"].tolist() == [[2]] * 4


def test_long_recordings_are_cut(tmp_path: Path) -> None:
    model = prepare(tmp_path, "wav2vec2")
    source = as_bytes(tmp_path, [tone(0, 31), *(tone(n) for n in range(1, 5))])
    examples = draw(tmp_path, model, source)
    assert max(x["input_values"].shape[1] for x in (*examples.fitted, *examples.held_out)) <= 30 * RATE


def broken(folder: Path) -> Path:
    return write_parquet(folder / "a.parquet", [{"audio": {"bytes": b"RIFF no sound", "path": "x.wav"}}] * 3)


def none(folder: Path) -> Path:
    return write_parquet(folder / "a.parquet", [{"text": "a word", "length": n} for n in range(3)])


def not_finite(folder: Path) -> Path:
    return as_bytes(folder, [numpy.array([0.0, numpy.nan], dtype=numpy.float32)] * 3)


def empty(folder: Path) -> Path:
    return as_bytes(folder, [numpy.zeros(0, dtype=numpy.float32)] * 3)


@pytest.mark.parametrize(
    ("store", "message"),
    [
        (
            broken,
            r"3 of 3 rows cannot be used; the first: the recording 'x\.wav' in column audio cannot be "
            r"decoded \(Format not recognised\.\)",
        ),
        (none, "no column holds recordings; the columns are text, length"),
        (not_finite, "some samples are NaN or infinite"),
        (empty, r"cannot be decoded \(it is empty\)"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_no_sound_is_refused(tmp_path: Path, store: Callable[[Path], Path], message: str) -> None:
    model = prepare(tmp_path, "wav2vec2")
    with pytest.raises(DataError, match=message):
        draw(tmp_path, model, store(tmp_path))


def test_packages_that_lack_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = prepare(tmp_path, "wav2vec2")
    monkeypatch.setitem(sys.modules, "soxr", None)
    with pytest.raises(DataError, match="sound cannot be read") as refused:
        draw(tmp_path, model, as_bytes(tmp_path, [tone(0)]))
    assert "pip install -e '.[audio]'" in refused.value.fix


def test_an_extractor_that_asks_for_gigabytes_is_not_used(tmp_path: Path) -> None:
    model = prepare(tmp_path, "whisper")
    settings = tmp_path / "merged/preprocessor_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"n_samples": 2**40}))
    with pytest.raises(DataError, match="no model reads inputs of that size"):
        draw(tmp_path, model, as_bytes(tmp_path, [tone(0)]))


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["whisper", "wav2vec2"])
def test_a_merge_that_hears_is_calibrated(tmp_path: Path, kind: str) -> None:
    prepare(tmp_path, kind)
    for seed, name in enumerate(("merged", "base", "expert")):
        make_model(kind, seed).save_pretrained(tmp_path / name)
    rows: list[dict[str, Any]] = [
        {"audio": {"bytes": encoded(tone(n, 0.1 + 0.01 * (n % 3))), "path": f"{n}.wav"}, "text": WORDS[4 + n % 3]}
        for n in range(24)
    ]
    write_parquet(tmp_path / "rows.parquet", rows)
    arguments = "calibrate merged --base base --expert speech=expert --data speech=rows.parquet -n 8 -o out --json"
    done = featcal(*arguments.split(), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert sum(not block["is_head"] for block in report["blocks"]) == (3 if kind == "whisper" else 2)
    assert all(block["modules"] for block in report["blocks"])


def test_batches_have_the_same_values_alone(tmp_path: Path) -> None:
    """What a recording becomes depends on no other in its batch, but for padding."""
    model = prepare(tmp_path, "whisper")
    source = as_bytes(tmp_path, [tone(n) for n in range(8)])
    drawn = draw_examples("speech", Data(path=str(source)), model, [tmp_path / "merged"], count=4, seed=0)
    together: Batch = drawn.cut(4).fitted[0]
    alone = [batch["input_features"][0] for batch in drawn.cut(1).fitted]
    assert torch.equal(together["input_features"], torch.stack(alone))
