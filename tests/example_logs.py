"""One small made-up log of every format, sound as it stands, for tests that go over all of them."""

import json


def lines(*rows: dict) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def bailian_row(chat_id=0, parent=-1, timestamp=0.0, input_length=40, hash_ids=(1, 2, 3), **more) -> dict:
    return {
        "chat_id": chat_id,
        "parent_chat_id": parent,
        "timestamp": timestamp,
        "input_length": input_length,
        "output_length": 5,
        "type": "text",
        "turn": 1,
        "hash_ids": list(hash_ids),
    } | more


def rag_row(timestamp="5", session="a", passages=(7, 8), **more) -> dict:
    ids = {
        "sys_prompt": [1],
        "passages_ids": list(passages),
        "history": [],
        "web_search": [],
        "user_input": [9],
    }
    row = {
        "timestamp": timestamp,
        "input_length": 50,
        "output_length": 5,
        "hash_ids": ids,
        "session_id": session,
    }
    return row | more


def claude_row(kind="assistant", second=0, content=None, message_id=None, **more) -> dict:
    """A row at ``second`` of a fixed minute; an assistant row has a usage of 100 + 20 + 3,000 prompt tokens."""
    message = {"role": kind, "content": content or [{"type": "text", "text": "hello there"}]}
    if kind == "assistant":
        usage = {"input_tokens": 100, "cache_creation_input_tokens": 20, "cache_read_input_tokens": 3000}
        message |= {"id": message_id or f"msg{second}", "model": "m", "usage": usage | {"output_tokens": 2}}
    row = {
        "type": kind,
        "timestamp": f"2026-01-01T00:{second // 60:02d}:{second % 60:02d}.000Z",
        "sessionId": "s1",
        "isSidechain": False,
        "uuid": f"{kind}{second}",
        "parentUuid": None,
        "message": message,
    }
    return row | more


def span(name="a", start="2026-01-01T00:00:00Z", end="2026-01-01T00:00:02Z", **attributes) -> dict:
    """A chat span of 10 + 5 tokens; keyword ``gen_ai__x`` sets the attribute ``gen_ai.x``."""
    given = {key.replace("__", "."): value for key, value in attributes.items()}
    usage = {"gen_ai.usage.input_tokens": 10, "gen_ai.usage.output_tokens": 5}
    return {
        "trace_id": "t1",
        "span_id": name,
        "parent_span_id": None,
        "start_time": start,
        "end_time": end,
        "attributes": {"gen_ai.operation.name": "chat"} | usage | given,
        "status": {"code": 1},
    }


BURSTGPT = (
    b"Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    b"5,ChatGPT,472,18,490,Conversation log\n45,GPT-4,10,5,15,API log\n"
)
TRACELAB = (
    b"id,input_len,output_len,arrival_time,round_idx,tool_wait_after_ms,prefix_len\n"
    b"0,100,10,1500,0,250.0,0\n0,20,10,1500,1,0,110\n1,7,1,500,0,0,0\n"
)
TRAJECTORY = {
    "history": [{"role": "system", "content": "x" * 400}, {"role": "user", "content": "y" * 400}],
    "trajectory": [
        {"action": "ls -l", "response": "z" * 100, "observation": "o" * 200, "execution_time": 0.5},
        {"action": "submit", "response": "z" * 100, "observation": "", "execution_time": 0.25},
    ],
    "info": {"model_stats": {"tokens_sent": 475, "tokens_received": 50, "api_calls": 2}},
}
BENCH = {
    "model_id": "m",
    "input_lens": [10, 20],
    "output_lens": [3, 2],
    "ttfts": [0.5, 0.25],
    "itls": [[0.1, 0.1], [0.5]],
    "start_times": [100.5, 100.0],
    "errors": ["", ""],
}
GUIDELLM_REQUEST = {
    "request_id": "r",
    "info": {"timings": {"request_start": 5.0, "request_end": 6.5, "first_iteration": 5.25}},
    "prompt_tokens": 10,
    "output_tokens": 4,
}

#: By the name of the format; what each gives is in the test of that format.
LOGS: dict[str, bytes] = {
    "azure": b"TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-01-01 00:00:00.0000000,7,1",
    "bailian": lines(bailian_row(), bailian_row(1, 0, 60.0, 72, (1, 2, 4, 5, 6))),
    "burstgpt": BURSTGPT,
    "canonical": b"arrival_time_s,input_tokens,output_tokens\n0,10,5\n1,20,5\n",
    "claude-code": lines(claude_row("user"), claude_row(second=5)),
    "guidellm": json.dumps(
        {"metadata": {}, "benchmarks": [{"requests": {"successful": [GUIDELLM_REQUEST]}}]}
    ).encode(),
    "llmservingsim": lines({"input_toks": 20, "output_toks": 2, "arrival_time_ns": 7}),
    "lmcache": lines(
        {"timestamp": 1_760_587_678_577_028, "input": "a" * 600, "output": "b" * 9, "session_id": "s"},
        {"timestamp": 1_760_587_678_077_028, "input": "a" * 300, "output": "", "session_id": "s"},
    ),
    "mooncake": lines({"timestamp": 5, "input_length": 600, "output_length": 1, "hash_ids": [0, 1]}),
    "otel": json.dumps({"trace_id": "t1", "spans": [span()]}, indent=1).encode(),
    "ragpulse": lines(rag_row(), rag_row("9")) + b"\n",
    "splitwise-sim": (
        b"request_id,request_type,application_id,arrival_timestamp,batch_size,prompt_size,token_size\n"
        b"0,2,0,1,1,4096,32\n"
    ),
    "swe-agent": json.dumps(TRAJECTORY).encode(),
    "tracelab": TRACELAB,
    "vidur": b"arrived_at,num_prefill_tokens,num_decode_tokens\n0.5,10,5\n0.0,20,2\n",
    "vllm-bench": json.dumps(BENCH).encode(),
    "weka": b'{"id": "a", "block_size": 64, "hash_id_scope": "local", "totals": {}, "requests": [{"t": 0.0,'
    b' "type": "n", "in": 64, "out": 1, "hash_ids": [1], "input_types": ["text"], "stop": "end_turn"}]}',
}
