"""Documents of a text file, rendered by the model's chat template: what the programs ask for behind the scenes.

Standard input: a line of JSON, {"file": NAME, "templates": {NAME: TEXT}, "special_tokens": {NAME: TEXT}},
then the bytes of the file. Standard output: for each row a line of JSON, {"at": PLACE, "text": TEXT, "chat": BOOL}
or {"at": PLACE, "error": WHY}, and {"end": ROWS} behind all of them. A file that cannot be read ends it with
{"fatal": WHY, "hint": HINT}.
"""
import argparse
import json
import resource
import signal
import sys

from ..chat_template import ChatTemplate
from ..documents import BadRow, document_of, rows
from ..errors import OscarError

# Templates come from elsewhere: what one of them may take.
SECONDS = 20  # for one document
MEMORY = 16 << 30  # address space, beside some copies of the file


class TooLong(BaseException):  # no handler of a template catches it
    pass


def stop(*_):
    raise TooLong(f"the chat template takes more than {SECONDS} seconds")


def documents(request, content):
    """Yields the answers, one for each row."""
    template = ChatTemplate(request["templates"], request["special_tokens"])
    for place, row in rows(content, request["file"]):
        signal.alarm(SECONDS)
        try:
            if isinstance(row, BadRow):
                raise row
            text, is_chat = document_of(row, template)
            text.encode()  # half a surrogate pair is no text
            yield {"at": place, "text": text, "chat": is_chat}
        except (BadRow, TooLong, UnicodeEncodeError, RecursionError) as error:
            yield {"at": place, "error": str(error)}
        finally:
            signal.alarm(0)


def main(words):
    parser = argparse.ArgumentParser(prog="python -m oscar_int2 render", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(words)
    request = json.loads(sys.stdin.buffer.readline())
    content = sys.stdin.buffer.read()
    limit = MEMORY + 64 * len(content)
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard < 0 else min(limit, hard), hard))
    signal.signal(signal.SIGALRM, stop)

    def put(answer):
        sys.stdout.write(json.dumps(answer) + "\n")
    count = 0
    try:
        for answer in documents(request, content):
            put(answer)
            count += 1
    except (OscarError, UnicodeDecodeError, MemoryError) as error:
        put({"fatal": str(error) or "out of memory", "hint": getattr(error, "hint", "")})
        return 1
    put({"end": count})
    return 0
