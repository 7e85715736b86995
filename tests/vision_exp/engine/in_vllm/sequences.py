"""Random sequences of requests against one server; after each, every image is as on a fresh one."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
import time
from collections.abc import Sequence
from typing import Any

import anthropic
import hypothesis
import openai
import rig_chat as rig
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test
from rig_server import Server

from vision_exp.validate import metrics
from vision_exp.validate.client import Client
from vision_exp.validate.judge import Verdict

IMAGES = range(5)
SOME = st.lists(st.sampled_from(IMAGES), min_size=1, max_size=3).map(tuple)


def messages(images: Sequence[int]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [rig.text("see"), *(rig.part(one) for one in images)]}]


def first_token(server: Server, images: Sequence[int], **more: Any) -> tuple[str, float]:
    """The first token of an answer, and its log-probability."""
    token = server.chat(messages(images), logprobs=True, **more).choices[0].logprobs.content[0]
    return token.token, token.logprob


def refused(server: Server, images: Sequence[int], **bad: Any) -> None:
    try:
        server.chat(messages(images), extra_body=bad)
    except openai.BadRequestError:
        return
    raise AssertionError(f"accepted: {bad}")


def count_tokens(server: Server, images: Sequence[int]) -> int:
    """As a coding agent does before each turn, by Anthropic's own client."""
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    blocks = []
    for image in images:
        data = rig.part(image)["image_url"]["url"].partition(",")[2]
        source = {"type": "base64", "media_type": "image/png", "data": data}
        blocks.append({"type": "image", "source": source})
    turn: Any = [{"role": "user", "content": blocks}]
    return client.messages.count_tokens(model=server.model, messages=turn).input_tokens


def replay(server: Server, images: Sequence[int], *, data: bool) -> int:
    """Render a prompt and send its ids: past the front end's cache. The status code."""
    body = {"model": server.model, "messages": messages(images), "max_tokens": 1}
    code, rendered = server.post("/v1/chat/completions/render", body)
    assert code == 200, rendered
    if not data:
        rendered["features"]["kwargs_data"] = None
    return server.post("/inference/v1/generate", rendered)[0]


class Open:
    """A request whose client may hang up."""

    def __init__(self, server: Server, images: Sequence[int]) -> None:
        body = {"model": server.model, "messages": messages(images), "max_tokens": 1}
        self.connection = http.client.HTTPConnection(server.url.removeprefix("http://"))
        head = {"Content-Type": "application/json"}
        self.connection.request("POST", "/v1/chat/completions", json.dumps(body), head)

    def hang_up(self) -> None:
        self.connection.close()


def wait_for(condition: Any, what: str) -> None:
    limit = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < limit, f"still not: {what}"
        time.sleep(0.005)


def hang_up_waiting(server: Server, images: Sequence[int]) -> None:
    """A client that hangs up while the engine has its request, before its first step."""
    server.call(server.engine.pause_generation(mode="keep", clear_cache=False))
    try:
        request = Open(server, images)
        wait_for(lambda: server.state()["requests"], "at the engine")
        request.hang_up()
        wait_for(lambda: not server.state()["requests"], "gone from the engine")
    finally:
        server.call(server.engine.resume_generation())


def check_each(server: Server) -> None:
    """What people reported, one after another: each image is still answered afterwards."""
    images = [0, 1]
    first_token(server, images)
    after = (
        ("bad parameter", lambda: refused(server, [2], temperature=-1)),
        ("too long", lambda: refused(server, [3], max_tokens=9999)),
        ("counted", lambda: count_tokens(server, [4])),
        ("hung up at the engine", lambda: hang_up_waiting(server, [2, 3])),
        ("past the front end", lambda: replay(server, [4, 0], data=True)),
        ("evicts its own hit", lambda: first_token(server, [1, 2, 3, 1])),
    )
    for what, request in after:
        request()
        for image in IMAGES:
            assert first_token(server, [image]), what
        check_nothing_left(server)


def check_ranks(server: Server) -> None:
    """Neither side has a second cache, and both engines have had requests with images."""
    assert server.images.sender is None
    states = server.states()
    assert len(states) == 2 and all(one["images"] is None for one in states), states
    assert all(one["encoded"] for one in states), states


def check_metrics(server: Server) -> None:
    """What the validator reads after cancellation is there, and shows a request that runs."""
    client = Client(f"{server.url}/v1", server.model)
    metrics.PATIENCE = 0.3  # the stream outlasts it
    stream: Any = None

    async def leave_open(_: Client) -> Verdict:
        nonlocal stream
        turn: Any = messages([0])
        more = {"extra_body": {"ignore_eos": True}, "max_tokens": 1500, "stream": True}
        stream = server.client.chat.completions.create(model=server.model, messages=turn, **more)
        next(stream)
        return Verdict(True, "", "")

    left = asyncio.run(metrics.left(client, leave_open))
    assert left.good is False and "running" in left.detail, left
    stream.close()
    metrics.PATIENCE = 5.0
    at_rest = asyncio.run(metrics.left(client, nothing))
    assert at_rest.good and "running 0 and 0" in at_rest.detail, at_rest
    assert asyncio.run(metrics.read(client)).keys() >= {*metrics.HELD, *metrics.CACHE}


async def nothing(_: Any) -> Verdict:
    return Verdict(True, "", "")


def check_nothing_left(server: Server) -> None:
    """Both caches hold the same, and nothing refers to what has ended."""
    wait_for(lambda: not server.state()["requests"], "idle")
    state, sender = server.state(), getattr(server.images, "sender", None)
    assert state["held"] == 0, "rows are held in the encoder cache"
    if sender is None:
        return
    if state["images"] is None:
        wait_for(lambda: not server.unread(), "read by the worker")
    else:
        ours = list(sender._cache.order)
        assert ours == state["images"], f"{ours} here, {state['images']} in the engine"


def machine(server: Server, fresh: dict[int, tuple[str, float]]) -> type[RuleBasedStateMachine]:
    """The rules. `fresh`: what a fresh server answers to each image."""

    class Requests(RuleBasedStateMachine):
        @rule(images=SOME, n=st.sampled_from([1, 1, 3]))
        def good(self, images: Sequence[int], n: int) -> None:
            server.chat(messages(images), n=n)

        @rule(image=st.sampled_from(IMAGES))
        def again(self, image: int) -> None:
            assert first_token(server, [image]) == fresh[image]

        @rule(images=SOME)
        def streaming(self, images: Sequence[int]) -> None:
            assert list(server.chat(messages(images), stream=True))

        @rule(images=SOME)
        def stream_that_is_cut(self, images: Sequence[int]) -> None:
            stream = server.client.chat.completions.create(
                model=server.model, messages=messages(images), max_tokens=200, stream=True
            )
            next(stream)
            stream.close()

        @rule(images=SOME)
        def beams(self, images: Sequence[int]) -> None:
            server.client.chat.completions.create(
                model=server.model,
                messages=messages(images),
                max_tokens=2,
                n=2,
                extra_body={"use_beam_search": True},
            )

        @rule(
            images=SOME,
            bad=st.sampled_from(
                [{"temperature": -1}, {"max_tokens": 9999}, {"truncate_prompt_tokens": 1}]
            ),
        )
        def refused(self, images: Sequence[int], bad: dict[str, Any]) -> None:
            refused(server, images, **bad)

        @rule(images=SOME)
        def counted(self, images: Sequence[int]) -> None:
            assert count_tokens(server, images) > 50

        @rule(images=SOME)
        def tokenized(self, images: Sequence[int]) -> None:
            body = {"model": server.model, "messages": messages(images)}
            assert server.post("/tokenize", body)[0] == 200

        @rule(images=SOME, data=st.booleans())
        def replayed(self, images: Sequence[int], data: bool) -> None:
            code = replay(server, images, data=data)
            assert code == 200 or (code == 400 and not data), code

        @rule(images=SOME, seconds=st.sampled_from([0.0, 0.01, 0.03]))
        def hang_up(self, images: Sequence[int], seconds: float) -> None:
            request = Open(server, images)
            time.sleep(seconds)
            request.hang_up()

        @rule(images=SOME)
        def hang_up_waiting(self, images: Sequence[int]) -> None:
            hang_up_waiting(server, images)

        @rule(some=st.lists(SOME, min_size=2, max_size=3))
        def together(self, some: list[Sequence[int]]) -> None:
            failed: list[BaseException] = []

            def one(images: Sequence[int]) -> None:
                try:
                    server.chat(messages(images))
                except BaseException as error:  # noqa: BLE001 - raised again below
                    failed.append(error)

            threads = [threading.Thread(target=one, args=(images,)) for images in some]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            if failed:
                raise failed[0]

        @rule(image=st.sampled_from(IMAGES), others=SOME)
        def tower_fails(self, image: int, others: Sequence[int]) -> None:
            server.break_images(image)
            try:
                server.chat(messages([*others, image]))
            except openai.InternalServerError:
                pass
            # Otherwise its rows were still there.
            finally:
                server.break_images()

        def teardown(self) -> None:
            check_nothing_left(server)
            for image in IMAGES:
                assert first_token(server, [image]) == fresh[image], f"image {image}"
            assert server.state()["failed"] == []
            check_nothing_left(server)

    return Requests


def run(server: Server, count: int, steps: int = 6) -> None:
    """`count` random sequences of up to `steps` requests. Raises for the first that fails."""
    fresh = {image: first_token(server, [image]) for image in IMAGES}
    assert len(set(fresh.values())) == len(IMAGES), fresh
    settings = hypothesis.settings(
        max_examples=count,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    run_state_machine_as_test(machine(server, fresh), settings=settings)
