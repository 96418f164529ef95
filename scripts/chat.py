#!/usr/bin/env python
"""A chat in the terminal, over the gateway's HTTP API.

Decides nothing: it keeps the turns of the conversation, sends them with each question, and prints what comes.
Ctrl-C stops one answer, a second one, Ctrl-D or /quit leaves. Only the standard library is used, so that it
runs beside any gateway, on any machine.
"""

import argparse
import http.client
import json
import os
import sys
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

HELP = "/clear begins anew, /help says this, /quit leaves; Ctrl-C stops an answer"


class ChatError(Exception):
    """What went wrong, and what to do about it, in one line."""


class Chat:
    """One conversation with one gateway."""

    def __init__(self, given: argparse.Namespace) -> None:
        """Asks for the model. Raises ChatError."""
        self._given = given
        self._turns: list[dict[str, str]] = []
        self.clear()
        with_body = self._request("GET", "/v1/models")
        self.model = json.loads(with_body.read())["data"][0]["id"]

    def clear(self) -> None:
        """Forget the conversation, but for what `--system` says."""
        self._turns = [{"role": "system", "content": self._given.system}] if self._given.system else []

    def answer_to(self, question: str) -> Iterator[str]:
        """The answer, piece by piece; what was told of it is part of the conversation, stopped or not."""
        body = {"model": self.model, "messages": [*self._turns, {"role": "user", "content": question}]}
        body |= {"stream": True, "temperature": self._given.temperature}
        if self._given.max_tokens is not None:
            body["max_tokens"] = self._given.max_tokens
        response = self._request("POST", "/v1/chat/completions", body)
        told = ""
        try:
            for line in response:
                event = _event(line)
                if event is None:
                    continue
                if "error" in event:
                    raise ChatError(event["error"]["message"])
                piece = event["choices"][0]["delta"].get("content") or "" if event["choices"] else ""
                told += piece
                yield piece
        finally:
            response.close()
            if told:
                self._turns += [{"role": "user", "content": question}, {"role": "assistant", "content": told}]

    def _request(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> http.client.HTTPResponse:
        url = urlsplit(self._given.url)
        kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
        headers = {"Content-Type": "application/json"}
        if self._given.api_key:
            headers["Authorization"] = f"Bearer {self._given.api_key}"
        try:
            connection = kind(url.hostname or "", url.port)
            connection.request(
                method, url.path.rstrip("/") + path, json.dumps(body) if body else None, headers
            )
            response = connection.getresponse()
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ChatError(
                f"nobody answers at {self._given.url} ({error}): start scripts/up.py, or name another --url"
            ) from None
        if response.status == 401:
            raise ChatError("the gateway wants a key: give --api-key, or set TANDEM_API_KEY")
        if response.status != 200:
            try:
                message = json.loads(response.read())["error"]["message"]
            except (ValueError, KeyError, TypeError):
                message = f"{self._given.url} answers {response.status}: is it a gateway of Tandem?"
            raise ChatError(message)
        return response


def _event(line: bytes) -> dict[str, Any] | None:
    """The data of one line of a stream; None for one without."""
    if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
        return None
    return json.loads(line[6:])


def converse(chat: Chat) -> None:
    """Until the person leaves."""
    while True:
        question = input("> ").strip()
        match question:
            case "":
                continue
            case "/quit":
                return
            case "/help":
                print(HELP)
                continue
            case "/clear":
                chat.clear()
                continue
        try:
            for piece in chat.answer_to(question):
                print(piece, end="", flush=True)
        except KeyboardInterrupt:
            print(" [stopped]", end="")
        except ChatError as error:
            print(f"chat: {error}", file=sys.stderr, end="")
        print()


def main() -> int:
    parser = argparse.ArgumentParser(description="Chat with a running gateway.", epilog=HELP)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the gateway (%(default)s)")
    parser.add_argument("--system", metavar="TEXT", help="what the model is told first")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="most tokens of an answer")
    parser.add_argument(
        "--temperature", type=float, default=0.7, metavar="T", help="0 is greedy (%(default)s)"
    )
    parser.add_argument(
        "--api-key", default=os.environ.get("TANDEM_API_KEY"), metavar="KEY", help="also TANDEM_API_KEY"
    )
    try:
        chat = Chat(parser.parse_args())
        print(f"{chat.model}; {HELP}", file=sys.stderr)
        converse(chat)
    except ChatError as error:
        print(f"chat: {error}", file=sys.stderr)
        return 1
    except (EOFError, KeyboardInterrupt):
        print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
