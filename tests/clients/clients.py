"""The official clients of both protocols against a running server: python clients.py http://127.0.0.1:1919

Every check is an assertion; the last line of the output is the number of checks.
"""

import json
import sys

import anthropic
import openai

URL = sys.argv[1]
FRANCE = "What is the capital of France?"
ANSWER = "The capital of France is Paris."
ASKED = [{"role": "user", "content": FRANCE}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
# No argument of the newest client, but still a field.
GREEDY = {"temperature": 0}
CHECKS = []


def check(function):
    CHECKS.append(function)
    return function


def refused(kind, call):
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"{kind} was expected")


OPENAI = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
ANTHROPIC = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)
TOOLS = [{"type": "function", "function": {"name": "visit", "parameters": PARAMETERS}}]
FLAT_TOOLS = [{"type": "function", "name": "visit", "parameters": PARAMETERS, "strict": False}]
ANTHROPIC_TOOLS = [{"name": "visit", "description": "Goes there.", "input_schema": PARAMETERS}]


@check
def models():
    assert [model.id for model in OPENAI.models.list()] == ["demo"]


@check
def chat():
    answer = OPENAI.chat.completions.create(model="demo", messages=ASKED, temperature=0)
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.prompt_tokens == 15 and answer.usage.prompt_tokens_details.cached_tokens >= 0
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0


@check
def chat_stream():
    options = {"include_usage": True}
    stream = OPENAI.chat.completions.create(
        model="demo", messages=ASKED, temperature=0, stream=True, stream_options=options
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == ANSWER
    assert chunks[-1].usage.completion_tokens == 8


@check
def chat_logprobs():
    answer = OPENAI.chat.completions.create(
        model="demo", messages=ASKED, temperature=0, logprobs=True, top_logprobs=2
    )
    content = answer.choices[0].logprobs.content
    assert "".join(token.token for token in content) == ANSWER
    assert all(len(token.top_logprobs) == 2 for token in content)


@check
def chat_tools():
    for stream in [False, True]:
        asked = dict(model="demo", messages=ASKED, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
        if stream:
            with OPENAI.chat.completions.stream(**asked) as events:
                for _ in events:
                    pass
                choice = events.get_final_completion().choices[0]
        else:
            choice = OPENAI.chat.completions.create(**asked).choices[0]
        assert choice.finish_reason == "tool_calls"
        call = choice.message.tool_calls[0]
        assert call.function.name == "visit"
        assert json.loads(call.function.arguments)["city"] in ["Paris", "Rome"]
        result = {"role": "tool", "tool_call_id": call.id, "content": "You are there."}
        messages = [*ASKED, choice.message.model_dump(exclude_none=True, exclude={"parsed"}), result]
        for entry in messages[1].get("tool_calls", []):
            entry["function"].pop("parsed_arguments", None)
        OPENAI.chat.completions.create(model="demo", messages=messages, tools=TOOLS, max_tokens=5)


@check
def chat_schema():
    schema = {"type": "json_schema", "json_schema": {"name": "visit", "schema": PARAMETERS, "strict": True}}
    answer = OPENAI.chat.completions.create(model="demo", messages=ASKED, response_format=schema, temperature=0)
    assert json.loads(answer.choices[0].message.content)["city"] in ["Paris", "Rome"]


@check
def completions():
    prompt = "Once upon a time, there was a"
    asked = dict(model="demo", prompt=prompt, temperature=0, max_tokens=12)
    text = OPENAI.completions.create(**asked).choices[0].text
    assert text == " kind girl named Rose. Rose had just moved to a new", text
    chunks = OPENAI.completions.create(**asked, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == text


@check
def responses():
    answer = OPENAI.responses.create(model="demo", input=FRANCE, temperature=0)
    assert answer.output_text == ANSWER and answer.status == "completed"
    assert answer.usage.input_tokens == 15
    with OPENAI.responses.stream(model="demo", input=FRANCE, temperature=0) as events:
        kinds = [event.type for event in events]
        assert events.get_final_response().output_text == ANSWER
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"


@check
def responses_tools():
    answer = OPENAI.responses.create(
        model="demo", input=FRANCE, tools=FLAT_TOOLS, tool_choice={"type": "function", "name": "visit"}
    )
    call = answer.output[0]
    assert call.type == "function_call" and call.name == "visit"
    items = [{"role": "user", "content": FRANCE}, call.model_dump(exclude_none=True)]
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "You are there."})
    OPENAI.responses.create(model="demo", input=items, tools=FLAT_TOOLS, max_output_tokens=5)


@check
def openai_errors():
    def ask(**more):
        return lambda: OPENAI.chat.completions.create(**{"model": "demo", "messages": ASKED, **more})

    error = refused(openai.BadRequestError, ask(max_tokens=0))
    assert error.param == "max_tokens"
    long = [{"role": "user", "content": "word " * 3000}]
    error = refused(openai.BadRequestError, ask(messages=long))
    assert error.code == "context_length_exceeded" and "prompt is too long: " in error.message
    refused(openai.BadRequestError, ask(extra_body={"colour": "red"}))
    refused(openai.NotFoundError, lambda: OPENAI.responses.retrieve("resp_1"))


@check
def messages():
    answer = ANTHROPIC.messages.create(model="demo", max_tokens=50, messages=ASKED, extra_body=GREEDY)
    assert answer.content[0].text == ANSWER and answer.stop_reason == "end_turn"
    assert answer.usage.input_tokens + answer.usage.cache_read_input_tokens == 15
    counted = ANTHROPIC.messages.count_tokens(model="demo", messages=ASKED)
    assert counted.input_tokens == 15


@check
def messages_stream():
    with ANTHROPIC.messages.stream(model="demo", max_tokens=50, messages=ASKED, extra_body=GREEDY) as stream:
        assert "".join(stream.text_stream) == ANSWER
        final = stream.get_final_message()
    assert final.stop_reason == "end_turn" and final.usage.output_tokens == 8


@check
def messages_tools():
    for stream in [False, True]:
        choice = {"type": "any", "disable_parallel_tool_use": True}
        asked = dict(model="demo", max_tokens=90, messages=ASKED, tools=ANTHROPIC_TOOLS, tool_choice=choice)
        if stream:
            with ANTHROPIC.messages.stream(**asked) as events:
                answer = events.get_final_message()
        else:
            answer = ANTHROPIC.messages.create(**asked)
        assert answer.stop_reason == "tool_use"
        call = answer.content[-1]
        assert call.type == "tool_use" and call.input["city"] in ["Paris", "Rome"]
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "You are there."}
        content = [block.model_dump(exclude_none=True) for block in answer.content]
        history = [*ASKED, {"role": "assistant", "content": content}, {"role": "user", "content": [result]}]
        ANTHROPIC.messages.create(model="demo", max_tokens=5, messages=history, tools=ANTHROPIC_TOOLS)


@check
def anthropic_errors():
    error = refused(
        anthropic.BadRequestError,
        lambda: ANTHROPIC.messages.create(model="demo", max_tokens=0, messages=ASKED),
    )
    assert error.body["error"]["type"] == "invalid_request_error"
    long = [{"role": "user", "content": "word " * 3000}]
    error = refused(
        anthropic.BadRequestError, lambda: ANTHROPIC.messages.create(model="demo", max_tokens=5, messages=long)
    )
    assert "prompt is too long: " in error.message


for run in CHECKS:
    run()
    print(run.__name__)
print(f"{len(CHECKS)} checks")
