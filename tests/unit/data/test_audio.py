"""Rows of sound become what a model's own feature extractor makes of them, wherever they lie and however they are
stored."""

import io
import json
import sys
from typing import Any

import numpy
import pytest
import soundfile
import torch
import transformers
from example_folder import WORDS, Folder, words_of
from families import BY_NAME, build_lively
from transformers import PreTrainedModel

from featcal_cli.data.preprocessing import load_preprocessor
from featcal_cli.recipe.schema import Data

RATE = 16_000
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
library: Any = transformers


def tone(number: int, seconds: float = 0.1, rate: int = RATE) -> Any:
    """A recording [samples], another one for each number."""
    time = numpy.arange(int(seconds * rate)) / rate
    return (0.5 * numpy.sin(2 * numpy.pi * (200 + 20 * number) * time)).astype(numpy.float32)


def encoded(wave: Any, rate: int = RATE, kind: str = "WAV", subtype: str | None = "FLOAT") -> bytes:
    soundfile.write(file := io.BytesIO(), wave, rate, format=kind, subtype=subtype)
    return file.getvalue()


def make_model(kind: str) -> PreTrainedModel:
    if kind == "whisper":
        model: PreTrainedModel = library.WhisperForConditionalGeneration(library.WhisperConfig(**HEARING))
    elif kind == "pair":
        sizes = {name: SOUNDING[name] for name in ("hidden_size", "num_attention_heads", "intermediate_size")}
        writing = library.BertConfig(**sizes, vocab_size=len(WORDS), is_decoder=True, add_cross_attention=True)
        hearing = library.Wav2Vec2Config(**SOUNDING)
        config = library.SpeechEncoderDecoderConfig.from_encoder_decoder_configs(hearing, writing)
        config.decoder_start_token_id, config.pad_token_id = 2, 0
        model = library.SpeechEncoderDecoderModel(config)
    else:
        model = library.Wav2Vec2ForCTC(library.Wav2Vec2Config(**SOUNDING))
    return model


def prepare(at: Folder, kind: str) -> PreTrainedModel:
    if kind == "whisper":
        library.WhisperFeatureExtractor(feature_size=8, chunk_length=1).save_pretrained(at.expert)
    else:
        library.Wav2Vec2FeatureExtractor(return_attention_mask=True).save_pretrained(at.expert)
    if kind != "wav2vec2":
        at.tokenizer()
    return make_model(kind)


def extract(at: Folder, wave: Any) -> Any:
    extractor = library.AutoFeatureExtractor.from_pretrained(at.expert)
    return torch.tensor(extractor(wave, sampling_rate=RATE)["input_values"][0])


def store(at: Folder, waves: list[Any], how: str = "bytes", rate: int = RATE) -> Data:
    """Recordings in a table, in a folder of two classes, or in files that rows name."""
    if how == "bytes":
        rows = [{"audio": {"bytes": encoded(x, rate), "path": f"{n}.wav"}, "id": n} for n, x in enumerate(waves)]
        return at.file("rows.parquet", rows)
    names = [f"{'low' if number < 4 else 'high'}/{number}.flac" for number in range(len(waves))]
    folder = at.images({name: encoded(x, rate, "FLAC", "PCM_24") for name, x in zip(names, waves, strict=True)})
    return folder if how == "folder" else at.rows(*({"file": f"images/{name}", "name": "x"} for name in names))


@pytest.mark.parametrize("how", ["bytes", "folder", "paths"])
def test_recordings_are_what_the_extractor_makes_of_them(at: Folder, how: str) -> None:
    model = prepare(at, "wav2vec2")
    waves = [tone(number, 0.1 + 0.01 * number) for number in range(8)]
    (batch,) = at.load(model, store(at, waves, how), count=4).fitted
    expected = {len(wave): extract(at, wave) for wave in waves}
    assert batch["input_values"].shape == batch["attention_mask"].shape
    for values, mask in zip(batch["input_values"], batch["attention_mask"], strict=True):
        length = int(mask.sum())
        assert torch.allclose(values[:length], expected[length], atol=1e-4)
        assert not values[length:].any()


def test_other_rates_and_channels_become_the_extractors(at: Folder) -> None:
    from scipy.signal import resample_poly  # which takes seconds to import

    model = prepare(at, "wav2vec2")
    slow = [numpy.stack([tone(n, 0.2, 8_000), tone(n + 40, 0.2, 8_000)], 1) for n in range(4)]
    batch = at.load(model, store(at, slow, rate=8_000)).fitted[0]
    doubled = [extract(at, resample_poly(x.mean(1), 2, 1)) for x in slow]
    for values in batch["input_values"]:  # other filters differ at the edges
        inner = slice(200, len(values) - 200)
        assert min(float((values[inner] - x[inner]).abs().max()) for x in doubled) < 0.02


@pytest.mark.parametrize(("kind", "sizes"), [("whisper", (8, 100)), ("pair", (1600,))])
def test_what_is_said_goes_to_the_decoder(at: Folder, kind: str, sizes: tuple[int, ...]) -> None:
    model = prepare(at, kind)
    texts = ["w1 w2", "w3", "w2 w2 w1", "w1"]
    rows = [{"audio": {"bytes": encoded(tone(n)), "path": ""}, "Sentence": text} for n, text in enumerate(texts)]
    examples = at.load(model, at.file("rows.parquet", rows))
    (batch,) = examples.fitted
    assert batch["input_features" if kind == "whisper" else "input_values"].shape == (4, *sizes)
    assert any("Sentence for the decoder" in note for note in examples.notes)
    read = [words.replace(" [PAD]", "") for words in words_of([batch], "decoder_input_ids")]
    assert sorted(read) == sorted(f"[CLS] {text}" for text in texts)
    assert torch.equal(batch["decoder_attention_mask"], (batch["decoder_input_ids"] > 0).long())
    for row in rows:
        del row["Sentence"]
    assert at.load(model, at.file("silent.parquet", rows)).fitted[0]["decoder_input_ids"].tolist() == [[2]] * 4


def test_long_recordings_are_cut_and_none_depends_on_others_of_its_batch(at: Folder) -> None:
    model = prepare(at, "wav2vec2")
    examples = at.load(model, store(at, [tone(0, 31), *map(tone, range(1, 5))]))
    assert max(x["input_values"].shape[1] for x in (*examples.fitted, *examples.held_out)) <= 30 * RATE
    model, source = prepare(at, "whisper"), store(at, list(map(tone, range(8))))
    together, alone = (at.load(model, source, count=4, batch_size=size).fitted for size in (4, 1))
    assert torch.equal(together[0]["input_features"], torch.cat([batch["input_features"] for batch in alone]))


SILENCE, BROKEN = numpy.zeros(0, dtype=numpy.float32), numpy.array([0.0, numpy.nan], dtype=numpy.float32)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"audio": {"bytes": b"RIFF no sound", "path": "x.wav"}},
         r"3 of 3 rows cannot be used; the first: the recording 'x\.wav' in column audio cannot be decoded"),
        ({"text": "a word", "length": 3}, "no column holds recordings; the columns are text, length"),
        ({"audio": {"bytes": encoded(BROKEN), "path": ""}}, "some samples are NaN or infinite"),
        ({"audio": {"bytes": encoded(SILENCE), "path": ""}}, r"cannot be decoded \(it is empty\)"),
        ({"audio": {"bytes": encoded(tone(0, 0.004)), "path": ""}}, "too short for the model"),
    ],
    ids=["broken", "none", "not-finite", "empty", "short"],
)  # fmt: skip
def test_what_is_no_sound_is_refused(at: Folder, row: dict[str, Any], message: str) -> None:
    at.refuse(prepare(at, "wav2vec2"), at.file("a.parquet", [row] * 3), message)


def test_a_recording_of_fewer_frames_than_the_model_joins_is_too_short(at: Folder) -> None:
    prepare(at, "wav2vec2")
    model = library.SEWModel(library.SEWConfig(**SOUNDING))
    frames = [int(model._get_feat_extract_output_lengths(torch.tensor(count))) for count in range(1000)]
    at.refuse(model, store(at, [tone(0)[: frames.index(1)]]), "too short for the model")


def test_model_ready_recordings_that_a_mask_cuts_too_short_are_left_out(at: Folder) -> None:
    waves, mask = torch.stack([torch.from_numpy(tone(number)) for number in range(12)]), torch.ones(12, 1600).long()
    mask[4, 7:] = 0
    examples = at.load(make_model("wav2vec2"), at.tensors(input_values=waves, attention_mask=mask), count=12)
    assert examples.fitted_count + examples.selection_count + examples.held_out_count == 11
    assert any("1 rows cannot be used" in note and "too short for the model" in note for note in examples.notes)


def test_sound_beside_text_is_refused_unless_the_text_alone_is_named(at: Folder) -> None:
    prepare(at, "whisper")
    model, rows = build_lively(BY_NAME["clap"]), [{"audio": {"bytes": encoded(tone(0))}, "text": WORDS[-1]}] * 3
    for given in (at.file("a.parquet", rows), store(at, [tone(0)])):
        at.refuse(model, given, "reads sound beside text, for which there is no preprocessing here")
    named = at.file("a.parquet", rows, columns={"text": "text"})
    assert at.load(model, named).fitted[0].keys() == {"input_ids", "attention_mask"}


def test_an_extractor_that_lacks_a_package_or_asks_for_gigabytes_is_not_used(
    at: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = prepare(at, "whisper")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "soxr", None)
        error = at.refuse(model, store(at, [tone(0)]), "sound cannot be read")
        assert "pip install -e '.[audio]'" in error.fix
    library.ClapFeatureExtractor().save_pretrained(at.path / "clap")
    assert load_preprocessor("feature extractor", [at.path / "clap"])[1] == "clap"
    settings = at.expert / "preprocessor_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"n_samples": 2**40}))
    at.refuse(model, store(at, [tone(0)]), "no model reads inputs of that size")


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["whisper", "wav2vec2"])
def test_a_merge_that_hears_is_calibrated(at: Folder, kind: str) -> None:
    prepare(at, kind)
    at.expert.rename(at.path / "merged")
    waves = [encoded(tone(n, 0.1 + 0.01 * (n % 3))) for n in range(24)]
    at.file("rows.parquet", [{"audio": {"bytes": x, "path": ""}, "text": f"w{n % 3}"} for n, x in enumerate(waves)])
    at.check_merge(lambda: make_model(kind), 3 if kind == "whisper" else 2, speech="rows.parquet")
