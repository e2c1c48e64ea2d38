"""/metrics: the engine's figures, and latencies seen by the server."""

from __future__ import annotations

from fake_engine import FakeEngine
from prometheus_client.parser import text_string_to_metric_families
from serving import Serve, Served, raw_request

from cuengine.stats import EngineStats


async def _samples(served: Served) -> dict[str, float]:
    status, text = await served.get("/metrics")
    assert status == 200
    return {
        sample.name + "".join(f"[{v}]" for k, v in sample.labels.items()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_the_engines_figures_are_shown(serve: Serve) -> None:
    figures = EngineStats(
        num_running=2, num_waiting=3, num_blocks=40, num_free_blocks=30, num_used_blocks=10,
        num_cached_blocks=7, prefix_queries=100, prefix_hits=64, num_preemptions=5, num_swaps=2,
        num_steps=9, prompt_tokens=120, generation_tokens=80,
    )  # fmt: skip
    samples = await _samples(await serve(FakeEngine(figures=figures, num_restarts=4)))
    expected = {
        "cuengine_engine_restarts_total": 4,
        "cuengine_requests_running": 2, "cuengine_requests_waiting": 3, "cuengine_kv_blocks": 40,
        "cuengine_kv_blocks_free": 30, "cuengine_kv_blocks_used": 10,
        "cuengine_kv_blocks_cached": 7, "cuengine_kv_cache_usage_ratio": 0.25,
        "cuengine_prefix_cache_queries_total": 100, "cuengine_prefix_cache_hits_total": 64,
        "cuengine_preemptions_total": 5, "cuengine_swaps_total": 2,
        "cuengine_engine_steps_total": 9, "cuengine_prompt_tokens_total": 120,
        "cuengine_generation_tokens_total": 80, "cuengine_model_info[fake-model]": 1,
    }  # fmt: skip
    assert {name: samples[name] for name in expected} == expected


async def test_guesses_and_what_came_of_them_are_shown_by_place(serve: Serve) -> None:
    figures = EngineStats(
        num_drafts=10, num_draft_tokens=20, num_accepted_tokens=12,
        num_accepted_tokens_per_pos=(9, 3),
    )  # fmt: skip
    samples = await _samples(await serve(FakeEngine(figures=figures)))
    name = "cuengine_spec_decode_num"
    assert samples[f"{name}_drafts_total"] == 10
    assert samples[f"{name}_draft_tokens_total"] == 20
    assert samples[f"{name}_accepted_tokens_total"] == 12
    assert samples[f"{name}_accepted_tokens_per_pos_total[0]"] == 9
    assert samples[f"{name}_accepted_tokens_per_pos_total[1]"] == 3


async def test_latencies_count_requests_and_gaps_between_tokens(serve: Serve) -> None:
    served = await serve(FakeEngine(text="abcd", delay=0.01))
    await served.post("/v1/completions", {"prompt": "a", "n": 2})
    await served.events("/v1/completions", {"prompt": ["a", "b"]})
    samples = await _samples(served)
    assert samples["cuengine_time_to_first_token_seconds_count"] == 3
    assert samples["cuengine_e2e_request_latency_seconds_count"] == 3
    assert samples["cuengine_time_per_output_token_seconds_count"] == 3
    # Three gaps in each of four samples of four tokens.
    assert samples["cuengine_inter_token_latency_seconds_count"] == 12
    assert samples["cuengine_requests_finished_total[stop]"] == 4
    gaps = samples["cuengine_inter_token_latency_seconds_sum"]
    assert gaps <= 2 * samples["cuengine_e2e_request_latency_seconds_sum"]
    assert gaps >= 12 * 0.009


async def test_an_abandoned_request_counts_as_aborted(serve: Serve) -> None:
    engine = FakeEngine()
    engine.gate.clear()
    served = await serve(engine)
    _, writer = await served.raw(raw_request("/v1/completions", {"prompt": "a"}))
    await engine.until(lambda: len(engine.calls) == 1)
    writer.close()
    await engine.until(lambda: engine.calls[0].aborted)
    samples = await _samples(served)
    assert samples["cuengine_requests_finished_total[abort]"] == 1


async def test_errors_of_requests_to_the_model_count_by_status_and_those_that_end_a_stream_too(
    serve: Serve,
) -> None:
    engine = FakeEngine(error=ZeroDivisionError(), error_at=2)
    served = await serve(engine, root_path="/llm")
    await served.post("/v1/completions", {"prompt": "a"})
    events = await served.events("/v1/completions", {"prompt": "a"})
    assert "error" in events[-1]
    await served.post("/v1/completions", {"prompt": 5})
    engine.failed = True
    # A probe is no request to the model.
    assert (await served.get("/ready"))[0] == 503
    assert (await served.get("/v1/nothing"))[0] == 404
    samples = await _samples(served)
    name = "cuengine_request_errors_total"
    assert {key: value for key, value in samples.items() if key.startswith(name)} == {
        f"{name}[500]": 2, f"{name}[400]": 1, f"{name}[503]": 0, f"{name}[504]": 0,
    }  # fmt: skip


async def test_an_engine_that_is_started_again_or_has_failed_is_not_up(serve: Serve) -> None:
    served = await serve()
    for state, up in (({}, 1), ({"restarting": True}, 0), ({"failed": True}, 0)):
        vars(served.engine).update({"restarting": False, "failed": False} | state)
        assert (await _samples(served))["cuengine_engine_up"] == up


async def test_two_servers_in_one_process_count_apart(serve: Serve) -> None:
    one, two = await serve(), await serve()
    await one.post("/v1/completions", {"prompt": "a"})
    assert (await _samples(two))["cuengine_e2e_request_latency_seconds_count"] == 0


async def test_figures_of_several_engines_have_the_replicas_name(serve: Serve) -> None:
    one = EngineStats(
        num_running=2, num_blocks=40, num_used_blocks=10, generation_tokens=80, num_drafts=3,
        num_accepted_tokens_per_pos=(9, 3),
    )  # fmt: skip
    other = EngineStats(num_running=1, num_blocks=20, num_used_blocks=20, generation_tokens=5)
    engine = FakeEngine(figures_of={"b": other, "a": one}, num_restarts=4)
    samples = await _samples(await serve(engine))
    expected = {
        "cuengine_requests_running[a]": 2, "cuengine_requests_running[b]": 1,
        "cuengine_kv_cache_usage_ratio[a]": 0.25, "cuengine_kv_cache_usage_ratio[b]": 1.0,
        "cuengine_generation_tokens_total[a]": 80, "cuengine_generation_tokens_total[b]": 5,
        "cuengine_spec_decode_num_accepted_tokens_per_pos_total[1][a]": 3,
        "cuengine_engine_restarts_total": 4,
    }  # fmt: skip
    assert {name: samples[name] for name in expected} == expected
    assert "cuengine_requests_running" not in samples


async def test_engines_that_are_there_and_that_are_to_be_are_counted_where_there_are_several(
    serve: Serve,
) -> None:
    samples = await _samples(await serve(FakeEngine(figures_of={}, counts=(2, 3))))
    assert (samples["cuengine_replicas"], samples["cuengine_replicas_wanted"]) == (2, 3)
    assert not [name for name in await _samples(await serve()) if "cuengine_replicas" in name]


async def test_one_engine_and_several_export_the_same_names(serve: Serve) -> None:
    alone = await _samples(await serve(FakeEngine()))
    several = await _samples(await serve(FakeEngine(figures_of={"a": EngineStats()})))
    assert {name.partition("[")[0] for name in alone} == {
        name.partition("[")[0] for name in several
    }
