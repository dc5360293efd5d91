"""Marks that frame tool calls, of all families. Most are tokens of the models that write them."""

HERMES_BEGIN, HERMES_END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"  # Qwen3-Coder's, within hermes' marks
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"  # GLM's, within them, too
PYTHON_TAG = "<|python_tag|>"
MISTRAL_BEGIN, MISTRAL_ARGS, MISTRAL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
DEEPSEEK_BEGIN, DEEPSEEK_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
DEEPSEEK_CALL, DEEPSEEK_CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
DEEPSEEK_SEPARATOR = "<｜tool▁sep｜>"
KIMI_BEGIN, KIMI_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
KIMI_CALL, KIMI_CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"
KIMI_ARGUMENTS = "<|tool_call_argument_begin|>"
GEMMA_BEGIN, GEMMA_END, GEMMA_QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
HARMONY_START, HARMONY_CHANNEL, HARMONY_MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
HARMONY_CONSTRAIN = "<|constrain|>"
HARMONY_END, HARMONY_RETURN, HARMONY_CALL = "<|end|>", "<|return|>", "<|call|>"
HARMONY_FINAL = f"{HARMONY_CHANNEL}final{HARMONY_MESSAGE}"  # before an answer
HARMONY_MARKS = (
    HARMONY_START,
    HARMONY_CHANNEL,
    HARMONY_MESSAGE,
    HARMONY_CONSTRAIN,
    HARMONY_END,
    HARMONY_RETURN,
    HARMONY_CALL,
)
MARKS = (
    HERMES_BEGIN,
    HERMES_END,
    KEY,
    KEY_END,
    VALUE,
    VALUE_END,
    PYTHON_TAG,
    MISTRAL_BEGIN,
    MISTRAL_ARGS,
    MISTRAL_ID,
    DEEPSEEK_BEGIN,
    DEEPSEEK_END,
    DEEPSEEK_CALL,
    DEEPSEEK_CALL_END,
    DEEPSEEK_SEPARATOR,
    KIMI_BEGIN,
    KIMI_END,
    KIMI_CALL,
    KIMI_CALL_END,
    KIMI_ARGUMENTS,
    GEMMA_BEGIN,
    GEMMA_END,
    GEMMA_QUOTE,
    *HARMONY_MARKS,
)
