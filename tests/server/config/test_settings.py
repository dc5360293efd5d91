"""Settings derived from the configuration slices: the list of flags, their groups in the help, and what has no flag."""

import argparse
from typing import get_args

import msgspec

from headrace.core.config import Config, Policy, SchedulerConfig
from headrace.scheduler.policies.policy import make_policy
from headrace.server.config.flags import add_flags
from headrace.server.config.settings import BY_KEY, GROUPS, SETTINGS

# Fields without a flag: copies of other fields, what the model decides, and limits that need no adjustment.
NOT_SETTINGS = {
    "model": {"hidden_size", "images", "no_images"},
    "engine": {"cache_dir", "cpuinfo", "pass_tokens"},
    "scheduler": {
        "page_size",
        "kv_pages",
        "max_model_len",
        "vocab_size",
        "metadata_rows",
        "library_salts",
        "kv_events",
        "lockstep",
        "rules",
    },
    "transfer": {"max_frame_bytes"},
}

# Flags, what they take, bounds, and the default of the field. A line that changes here changes what users write.
FLAGS = """\
--accept-return TEXT =
--allow-prefill TEXT =
--allowed-host TEXT =
--allowed-image-host TEXT =
--api-key TEXT =
--attention {auto,flashinfer,triton,torch} = auto
--audit-rate SHARE [0..1] = 0.0
--bootstrap-port N [0..65535] = 0
--bootstrap-timeout SECONDS [0.001..] = 30.0
--cache-dir TEXT =
--chat-template TEXT =
--checksum-shm/--no-checksum-shm SWITCH = False
--checksum/--no-checksum SWITCH = True
--chunk-tokens N [0..] = 0
--chunking {fixed,dynamic} = fixed
--compile {auto,on,products,off} = auto
--control-port N [0..65535] = 0
--cuda-graphs {auto,off} = auto
--curve-allowed TEXT =
--curve-key TEXT =
--curve-server-key TEXT =
--data-port N [0..65535] = 0
--decoder {auto,native,library} = auto
--device TEXT = auto
--disk-admission-turn N [0..] = 1
--disk-gib N [0..] = 16
--disk-path TEXT =
--disk-write-gib-per-day N [0..] = 0
--dp N [1..] = 1
--dp-external TEXT =
--dp-sync {cpu,device} = cpu
--drain-grace SECONDS [0..3600] = 0.0
--drain-timeout SECONDS [0..] = 30.0
--dtype {auto,float32,bfloat16,float16} = auto
--eviction {lru,turns} = turns
--exchange {auto,allgather,alltoall} = auto
--expert-parallel/--no-expert-parallel SWITCH = False
--fallback {none,local} = none
--gateway-decode TEXT =
--gateway-decode-api-key TEXT =
--gateway-port N [0..65535] = 8100
--hedge FACTOR [0..] = 0.0
--hold-lease SECONDS [0.001..] = 30.0
--hold-limit SECONDS [0.001..] = 600.0
--hold-percent N [0..100] = 50
--host TEXT = 127.0.0.1
--host-pages N [0..] = 0
--if-available-tokens N [0..] = 64
--insecure/--no-insecure SWITCH = False
--keep-alive SECONDS [1..86400] = 630.0
--kv-events-buffer N [1..1e+06] = 10000
--kv-events-host TEXT = 127.0.0.1
--kv-events-port N [0..65535] = 0
--kv-events-replay-port N [0..65535] = 0
--kv-events-topic TEXT =
--kv-library TEXT =
--kv-library-any-cpu/--no-kv-library-any-cpu SWITCH = False
--kv-library-seconds SECONDS [1..] = 60.0
--kv-memory SHARE [0..1] = 0.0
--kv-pages N [0..] = 0
--kv-return/--no-kv-return SWITCH = False
--links {auto,device,host} = auto
--log-format {text,json} = text
--log-level {debug,info,warning,error} = info
--lora TEXT =
--max-body-bytes BYTES [1024..] = 16777216
--max-hidden-bytes BYTES [0..] = 16777216
--max-image-bytes BYTES [1..] = 8388608
--max-image-pixels N [1..] = 16777216
--max-images N [0..] = 16
--max-model-len N [0..] = 0
--max-peers N [1..] = 64
--max-predicted-ttft SECONDS [0..] = 0.0
--max-queued-requests N [1..] = 4096
--max-queued-seconds SECONDS [0..] = 0.0
--max-queued-tokens N [1..] = 262144
--max-running N [1..] = 64
--max-tickets-per-peer N [1..] = 1024
--metrics-names {headrace,vllm} = headrace
--mla {auto,absorbed,expanded,length} = auto
--model TEXT = smollm2
--open-prompts N [0..] = 16
--open-seconds SECONDS [0.001..86400] = 300.0
--optimistic-start/--no-optimistic-start SWITCH = False
--otlp-header TEXT =
--otlp-traces-endpoint TEXT =
--overlap-decode-tokens N [2..] = 32
--overlap-prefill-tokens N [2..] = 512
--overlap/--no-overlap SWITCH = False
--page-size N [1..4096] = 16
--peer-timeout SECONDS [0.05..] = 3.0
--pipeline-depth N [0..16] = 1
--policy {srpt,fcfs,slo} = srpt
--policy-reserve SHARE [0..1] = 0.1
--port N [0..65535] = 8000
--pp N [1..] = 1
--pp-layers N,N,... =
--prefill TEXT =
--prefill-api-key TEXT =
--prefix-cache/--no-prefix-cache SWITCH = True
--priority-range TEXT =
--promise {off,p50,p75,p90,p95,p99,p99.9} = off
--quantize {none,int8} = none
--reasoning-parser {auto,none,think,harmony,gemma4,kimi,mistral,seed_oss} = auto
--record TEXT =
--record-minutes N [1..120] = 5
--record-tokens/--no-record-tokens SWITCH = False
--refuse-unreachable/--no-refuse-unreachable SWITCH = True
--remote {always,never,cost} = always
--retain-percent N [0..100] = 10
--role {prefill,decode,colocated} = colocated
--routing {score,least-load} = score
--served-model-name TEXT =
--share-prefixes/--no-share-prefixes SWITCH = False
--sibling TEXT =
--stage-host TEXT = 127.0.0.1
--stage-key TEXT =
--stage-port N [0..65535] = 0
--stage-timeout SECONDS [0.001..] = 120.0
--stages {local,external} = local
--start-timeout SECONDS [1..] = 600.0
--tenant-key TEXT =
--tenant-lag-s SECONDS [0..] = 5.0
--threads N [0..] = 0
--tool-parser {auto,hermes,llama3_json,mistral,deepseek_v3,kimi_k2,qwen3_coder,glm45,gemma4,harmony} = auto
--tp N [1..64] = 1
--trace-attribute TEXT =
--trace-sample-ratio SHARE [0..1] = 1.0
--trace-service-name TEXT =
--transfer-backends NAME,NAME,... = cuda_ipc,shm,zmq
--transfer-host TEXT = 127.0.0.1
--transfer-timeout SECONDS [0.001..] = 10.0
--trusted-network/--no-trusted-network SWITCH = False
--window-bytes BYTES [65536..] = 67108864
--windows {keep,free} = keep
"""


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="headrace serve", allow_abbrev=False)
    add_flags(parser)
    return parser


def described(action: argparse.Action) -> str:
    """A line of FLAGS."""
    setting, options = BY_KEY[action.dest], "/".join(action.option_strings)
    low, high = (f"{bound:g}" if bound is not None else "" for bound in (setting.flag.low, setting.flag.high))
    bounds = f" [{low}..{high}]" if low else ""
    value = setting.value(Config())
    shown = ",".join(map(str, value)) if isinstance(value, tuple) else value
    return f"{options} {action.metavar or 'SWITCH'}{bounds} = {shown}".rstrip()


def test_flags_and_defaults_are_those_of_the_golden_list() -> None:
    actions = [action for action in parser()._actions if action.dest not in ("help", "config")]
    assert sorted(map(described, actions)) == FLAGS.splitlines()


def test_every_field_is_a_setting_unless_listed() -> None:
    for field in msgspec.structs.fields(Config):
        names = {each.name for each in msgspec.structs.fields(field.type)}
        found = {setting.field for setting in SETTINGS if setting.slice == field.name}
        assert found == names - NOT_SETTINGS.get(field.name, set()), field.name
    assert len(BY_KEY) == len(SETTINGS), "two settings have the same key"


def test_choices_come_from_the_types() -> None:
    assert BY_KEY["chunking"].choices == ("fixed", "dynamic")
    assert (BY_KEY["transfer-backends"].kind, BY_KEY["transfer-backends"].choices[0]) == ("choices", "cuda_ipc")
    assert (BY_KEY["window-bytes"].kind, BY_KEY["max-peers"].kind) == ("size", "integer")


def test_the_policies_that_can_be_chosen_are_those_of_the_scheduler() -> None:
    for name in get_args(Policy):
        assert len(make_policy(SchedulerConfig(policy=name))) == 0


def test_help_lists_the_flags_in_groups_with_defaults() -> None:
    text = parser().format_help()
    sections = {group: text.index(f"\n{group}:\n") for group in GROUPS}
    assert list(sections.values()) == sorted(sections.values())
    handoff = text[sections["KV handoff"] : sections["pipeline stages"]]
    assert "--hold-lease SECONDS" in handoff
    for default in ("cuda_ipc,shm,zmq", "64MiB", "30", "on"):
        assert f"(default: {default})" in " ".join(handoff.split())
    security = " ".join(text[sections["security"] : sections["scheduling"]].split())
    assert "also HEADRACE_API_KEY" in security
    assert "(default: off)" in security
