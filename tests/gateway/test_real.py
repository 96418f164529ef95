"""A gateway on a real pair of emulated nodes, used as people use it: with the openai client, and badly."""

import asyncio
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from tests.gateway.conftest import LANES
from tests.gateway.harness import GatewayProcess, check_stream, events_of, parsed, request_bytes
from tests.process.harness import wait_until
from tests.process.world import Pair, World, expected, prompt_of

MODEL = "emulated-0"
TURNS = [{"role": "user", "content": "hello there"}]
LEAVING_CLIENTS = 200


@pytest.fixture
def client(gateway: GatewayProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=gateway.url + "/v1", api_key="none", max_retries=0, timeout=20) as client:
        yield client


def text_of(prompt_ids: list[int], max_tokens: int) -> str:
    """What the model must answer, as far as it is text."""
    token_ids = expected(prompt_ids, max_tokens)
    return bytes(token_id for token_id in token_ids if token_id < 256).decode(errors="replace")


def test_a_greedy_completion_has_the_oracles_text_and_truthful_usage(client: openai.OpenAI) -> None:
    prompt_ids = prompt_of(40, 1)
    answer = client.completions.create(model=MODEL, prompt=prompt_ids, max_tokens=12, temperature=0)
    assert answer.choices[0].text == text_of(prompt_ids, 12)
    assert answer.usage.prompt_tokens == 40
    assert answer.usage.completion_tokens == len(expected(prompt_ids, 12))
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert answer.tandem["path"] == "remote"
    timings = answer.tandem["timings"]
    assert sum(timings["stages_ms"].values()) == timings["total_ms"]


def test_path_and_timings_are_headers_too(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=TURNS, max_tokens=3)
    assert raw.headers["x-tandem-path"] == "remote"
    assert json.loads(raw.headers["x-tandem-timings"]) == raw.parse().tandem["timings"]
    assert raw.parse().choices[0].message.role == "assistant"


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
@pytest.mark.parametrize("temperature", [0, 1.5])
def test_short_answers_have_as_many_tokens_as_asked_for_in_both_modes(
    client: openai.OpenAI, max_tokens: int, temperature: float
) -> None:
    asked = {"model": MODEL, "messages": TURNS, "max_tokens": max_tokens, "temperature": temperature}
    asked |= {"seed": 7, "extra_body": {"ignore_eos": True}}
    whole = client.chat.completions.create(**asked)
    chunks = list(
        client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == chunks[-1].usage.completion_tokens == max_tokens
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert [reason for reason in reasons if reason] == ["length"]


def test_the_clients_own_stream_helper_reads_our_streams(client: openai.OpenAI) -> None:
    asked = {"model": MODEL, "messages": TURNS, "max_tokens": 8, "temperature": 0}
    # It takes an answer that was cut for an error.
    stop = client.chat.completions.create(**asked).choices[0].message.content[-1]
    with client.chat.completions.stream(**asked, stop=stop) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "content.delta" in kinds
    assert final.choices[0].message.content
    assert final.choices[0].finish_reason == "stop"


def test_the_async_client_streams_several_at_once(gateway: GatewayProcess) -> None:
    async def one(client: openai.AsyncOpenAI, salt: int) -> str:
        stream = await client.completions.create(
            model=MODEL, prompt=prompt_of(30, salt), max_tokens=10, temperature=0, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=gateway.url + "/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(one(client, salt) for salt in range(2 * LANES)))

    assert asyncio.run(run()) == [text_of(prompt_of(30, salt), 10) for salt in range(2 * LANES)]


def test_content_in_text_parts_is_the_same_as_their_text(gateway: GatewayProcess) -> None:
    parts = [{"type": "text", "text": "hello "}, {"type": "text", "text": "there"}]
    answers = [
        gateway.post(
            "/v1/chat/completions",
            {
                "model": MODEL,
                "messages": [{"role": "user", "content": content}],
                "temperature": 0,
                "max_tokens": 9,
            },
        ).json()
        for content in (parts, "hello there")
    ]
    assert answers[0]["choices"] == answers[1]["choices"]


def test_a_chat_that_does_not_say_gets_what_fits(gateway: GatewayProcess, pair: Pair) -> None:
    limit = pair.world.status(pair.decode)["max_tokens"]
    turns = [{"role": "user", "content": "x" * (limit - 40)}]
    body = {"model": MODEL, "messages": turns, "ignore_eos": True, "temperature": 0}
    usage = gateway.post("/v1/chat/completions", body).json()["usage"]
    assert usage["total_tokens"] == limit
    turns[0]["content"] = "x" * limit
    refused = gateway.post("/v1/chat/completions", body).json()["error"]
    assert refused["code"] == "context_length_exceeded"
    assert f"the limit is {limit}" in refused["message"]


def test_echo_begins_with_the_prompt_as_text_or_as_ids(gateway: GatewayProcess) -> None:
    for prompt in ("abc", [97, 98, 99], ["abc"], [[97, 98, 99]]):
        body = {"model": MODEL, "prompt": prompt, "echo": True, "max_tokens": 3, "temperature": 0}
        text = gateway.post("/v1/completions", body).json()["choices"][0]["text"]
        assert text == "abc" + text_of([97, 98, 99], 3)
        streamed = check_stream(events_of(gateway.post("/v1/completions", {**body, "stream": True})))
        assert streamed == text


def test_tokenize_and_detokenize_are_each_others_inverse(gateway: GatewayProcess, pair: Pair) -> None:
    told = gateway.post("/tokenize", {"prompt": "grüß"}).json()
    assert told["tokens"] == list("grüß".encode())
    assert told["count"] == len(told["tokens"])
    assert told["max_model_len"] == pair.world.status(pair.decode)["max_tokens"]
    assert gateway.post("/detokenize", {"tokens": told["tokens"]}).json() == {"prompt": "grüß"}
    chat = gateway.post("/tokenize", {"messages": TURNS}).json()
    body = {"model": MODEL, "messages": TURNS, "max_tokens": 1}
    usage = gateway.post("/v1/chat/completions", body).json()["usage"]
    assert chat["count"] == usage["prompt_tokens"]
    wrong = gateway.post("/detokenize", {"tokens": [10**6]})
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (400, "token_out_of_range")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_every_token_has_its_logprob_from_the_first_on(client: openai.OpenAI, stream: bool) -> None:
    asked = {"model": MODEL, "messages": TURNS, "max_tokens": 6, "temperature": 0, "logprobs": True}
    asked |= {"top_logprobs": 3, "extra_body": {"ignore_eos": True}}
    if stream:
        chunks = client.chat.completions.create(**asked, stream=True)
        told = [chunk.choices[0].logprobs for chunk in chunks]
        tokens = [token for one in told if one for token in one.content]
    else:
        tokens = client.chat.completions.create(**asked).choices[0].logprobs.content
    assert len(tokens) == 6
    for token in tokens:
        assert len(token.top_logprobs) == 3
        # Greedy: the token is the likeliest one.
        assert token.logprob == max(other.logprob for other in token.top_logprobs) < 0


def test_choices_are_those_of_seeds_that_follow_each_other(gateway: GatewayProcess) -> None:
    body = {"model": MODEL, "prompt": "abc", "max_tokens": 8, "temperature": 1, "ignore_eos": True}
    response = gateway.post("/v1/completions", {**body, "seed": 5, "n": 3})
    alone = [gateway.post("/v1/completions", {**body, "seed": seed}).json() for seed in (5, 6, 7)]
    texts = [choice["text"] for choice in response.json()["choices"]]
    assert texts == [answer["choices"][0]["text"] for answer in alone]
    assert response.json()["usage"]["completion_tokens"] == 24
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    streamed = gateway.post("/v1/completions", {**body, "seed": 5, "n": 3, **stream})
    assert check_stream(events_of(streamed), choices=3, usage=True) == texts[0]


def test_penalties_and_biases_reach_the_sampler(gateway: GatewayProcess) -> None:
    body = {"model": MODEL, "prompt": "abc", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    plain = gateway.post("/v1/completions", body).json()["choices"][0]["text"]
    banned = {"logit_bias": {str(ord(plain[0])): -100}}
    for changed in ({"repetition_penalty": 2}, {"presence_penalty": 2, "frequency_penalty": 2}, banned):
        text = gateway.post("/v1/completions", {**body, **changed}).json()["choices"][0]["text"]
        assert text != plain
    assert plain[0] not in gateway.post("/v1/completions", {**body, **banned}).json()["choices"][0]["text"]


def test_a_character_split_over_tokens_is_whole_in_the_stream(gateway: GatewayProcess) -> None:
    body = {"model": MODEL, "prompt": "x", "max_tokens": 200, "temperature": 1.5, "ignore_eos": True}
    body |= {"seed": 3, "logit_bias": {str(byte): -100 for byte in range(32, 127)}}
    whole = gateway.post("/v1/completions", body)
    streamed = check_stream(events_of(gateway.post("/v1/completions", {**body, "stream": True})))
    assert streamed == whole.json()["choices"][0]["text"]


@pytest.mark.parametrize(
    "prompt", ["", [], [""], [[]], 5, None, [0, "a"], {"a": 1}, ["a", "b"], [-1], [10**9], [1.5]]
)
def test_a_prompt_that_is_none_is_refused_and_the_next_one_served(
    gateway: GatewayProcess, prompt: Any
) -> None:
    response = gateway.post("/v1/completions", {"model": MODEL, "prompt": prompt, "max_tokens": 2})
    assert response.status_code == 400
    good = gateway.post("/v1/completions", {"model": MODEL, "prompt": "a", "max_tokens": 2})
    assert good.status_code == 200


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 2.1),
        ("top_p", 0),
        ("top_k", -2),
        ("min_p", 1.1),
        ("seed", -1),
        ("stop", [""]),
        ("stop_token_ids", [10**6]),
        ("presence_penalty", 3),
        ("frequency_penalty", -3),
        ("repetition_penalty", 0),
        ("logit_bias", {"a": 1}),
        ("min_tokens", -1),
        ("max_tokens", 10**9),
    ],
)
def test_a_value_out_of_range_is_refused(gateway: GatewayProcess, field: str, value: Any) -> None:
    response = gateway.post("/v1/completions", {"model": MODEL, "prompt": "a", "max_tokens": 5, field: value})
    assert response.status_code == 400
    assert field in response.json()["error"]["message"]


async def _leave(address: tuple[str, int], number: int) -> None:
    generator = random.Random(number)
    body = {"model": MODEL, "messages": TURNS, "max_tokens": 200, "stream": number % 2 == 0}
    reader, writer = await asyncio.open_connection(*address)
    writer.write(request_bytes("/v1/chat/completions", {**body, "ignore_eos": True}))
    await writer.drain()
    with_bytes = generator.random() < 0.3
    try:
        async with asyncio.timeout(generator.random() * 0.4):
            await reader.read(1 if with_bytes else 10**6)
    except TimeoutError:
        pass
    writer.close()


def test_after_200_clients_that_left_at_random_moments_the_next_one_is_served_as_ever(
    gateway: GatewayProcess, pair: Pair
) -> None:
    before = gateway.metric("tandem_gateway_disconnects_total")

    async def leave() -> None:
        await asyncio.gather(*(_leave(gateway.address, number) for number in range(LEAVING_CLIENTS)))

    asyncio.run(leave())
    answer = gateway.post("/v1/chat/completions", {"model": MODEL, "messages": TURNS, "max_tokens": 5}).json()
    assert answer["usage"]["completion_tokens"] <= 5
    assert answer["tandem"]["timings"]["total_ms"] < 1_000
    gateway.wait_metric("tandem_gateway_disconnects_total", before + LEAVING_CLIENTS // 2)
    assert gateway.metric("tandem_gateway_jobs_in_flight") == 0
    pair.wait_clean()


def test_two_gateways_share_a_decode_node(
    gateway: GatewayProcess, pair: Pair, gateways: Callable[..., GatewayProcess]
) -> None:
    other = gateways(pair.decode.endpoint)
    other.wait_connected()
    bodies = [
        {"model": MODEL, "prompt": prompt_of(20, salt), "max_tokens": 6, "temperature": 0} for salt in (1, 2)
    ]
    for body in bodies:
        texts = [each.post("/v1/completions", body).json()["choices"][0]["text"] for each in (gateway, other)]
        assert texts[0] == texts[1] == text_of(body["prompt"], 6)
    other.close()
    assert gateway.post("/v1/completions", bodies[0]).status_code == 200


def test_a_node_that_dies_ends_its_streams_with_an_error_and_is_used_again_when_back(
    world: World, gateways: Callable[..., GatewayProcess]
) -> None:
    endpoint = f"ipc://{world.directory}/lane"
    node = world.decode(None, "--emulated-decode-ms", "5", bind=endpoint)
    gateway = gateways(endpoint)
    gateway.wait_connected()
    body = {"model": MODEL, "messages": TURNS, "max_tokens": 900, "ignore_eos": True, "stream": True}
    with gateway.stream(body) as response:
        lines = response.iter_lines()
        for _ in range(20):
            next(lines)
        world.kill(node)
        rest = list(parsed(lines))
    assert rest[-1] == "[DONE]"
    assert rest[-2]["error"]["code"] == "peer_lost"
    refused = gateway.post("/v1/chat/completions", body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "node_unavailable")
    assert gateway.get("/health/ready").status_code == 503
    world.decode(None, bind=endpoint)
    wait_until(lambda: gateway.get("/health/ready").status_code == 200, "the gateway has a node again", [])
    assert gateway.post("/v1/chat/completions", {**body, "max_tokens": 3}).status_code == 200
