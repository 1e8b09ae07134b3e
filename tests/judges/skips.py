"""Tests of others that this server is not asked to pass, and why. The first pattern that fits counts.

Patterns are module::function without the prefix "test_" and without parameters, or with the parameters in full.
"""

_STORIES = "asks for the text or the number of tokens of the model stories260K"
_NATIVE = "llama.cpp's own path or field"
_OPTION = "an option that llama.cpp's server is started with"
_CORS = "llama.cpp answers any browser's origin; here CORS is off until --allowed-origin"
_INSIDE = "tests code inside vLLM, not its protocol"
_TRAINED = "asks for a model that was trained to call tools, reason or count"
_ASKED = "here a field that was not asked for is left out, not null"
_LONG = "asks for more than the embedded model's 512 tokens"
_WIRE = "vLLM's own field, which is refused by its name"
_WEBSOCKET = "no WebSocket"
_COMPACT = "no /v1/responses/compact"

SKIPS: dict[str, list[tuple[str, str]]] = {
    "openresponses": [
        ("websocket-*", _WEBSOCKET),
        ("compact-*", _COMPACT),
        ("image-input", "no images"),
        ("tool-calling", _TRAINED),
        ("system-prompt", "asks for an end before the 512 tokens of the embedded model"),
        ("assistant-phase", "asks for an end before the 512 tokens of the embedded model"),
        ("basic-response", "asks for an end before the 512 tokens of the embedded model"),
        ("streaming-response", "asks for an end before the 512 tokens of the embedded model"),
        ("multi-turn", "asks for an end before the 512 tokens of the embedded model"),
    ],
    "ogx": [
        ("batches::batch_e2e_embeddings", "the embedded model makes no embeddings"),
        (
            "batches_errors::batch_nonexistent_file_id",
            "here a missing file is 404 at once, not a batch that fails",
        ),
        ("batches_errors::batch_invalid_endpoint", "asks for the words 'supported values'"),
        ("batches_errors::batch_missing_required_fields", "here a line without a method is a POST"),
        ("batches_errors::batch_missing_required_body_fields", "here a line needs no model"),
        ("batches_errors::batch_invalid_completion_window", "here other windows than 24h are real"),
        (
            "batches_errors::batch_endpoint_mismatch",
            "asks for the code invalid_url; here mismatched_endpoint",
        ),
        ("batches_errors::batch_invalid_metadata_types", "asks for the key's name in the message"),
        ("batches_idempotency::*", "idempotency_key is ogx' own"),
    ],
    "llama.cpp": [
        ("basic::server_multiple_addresses", _OPTION),
        ("basic::server_props", _NATIVE),
        ("basic::server_models", "asks for one name; this server has many here"),
        ("basic::server_slots", _NATIVE),
        ("basic::load_split_model", _NATIVE),
        ("basic::no_ui", _OPTION),
        ("basic::server_model_aliases_and_tags", _OPTION),
        ("chat_completion::chat_completion", _STORIES),
        ("chat_completion::chat_completion_cached_tokens", _STORIES),
        ("chat_completion::chat_completion_stream", _STORIES),
        ("chat_completion::chat_completion_with_openai_library", _STORIES),
        ("chat_completion::chat_template", _NATIVE),
        ("chat_completion::chat_template_assistant_prefill", _NATIVE),
        ("chat_completion::chat_template_continue_final_message_vllm_compat", _NATIVE),
        ("chat_completion::apply_chat_template", _NATIVE),
        ("chat_completion::completion_with_json_schema", _NATIVE),
        ("chat_completion::completion_with_grammar", _NATIVE),
        (
            "chat_completion::invalid_chat_completion_req[messages7]",
            "here two messages of the assistant may follow each other, as the template decides",
        ),
        ("chat_completion::chat_completion_with_timings_per_token", _NATIVE),
        ("chat_completion::logprobs_stream", 'asks for a first delta without content; OpenAI\'s has ""'),
        ("chat_completion::logit_bias", _NATIVE),
        (
            "chat_completion::context_size_exceeded*",
            "asks for a type of its own; OpenAI's is invalid_request_error",
        ),
        ("chat_completion::return_progress", _NATIVE),
        ("chat_completion::chat_completions_multiple_choices", _NATIVE),
        ("chat_completion::chat_completions_token_count", _NATIVE),
        ("chat_completion::verbose_debug", _NATIVE),
        ("completion::completion_with_openai_library", _STORIES),
        ("completion::completion_stream_with_openai_library*", _STORIES),
        ("completion::*", _NATIVE),
        ("tokenize::*", "asks for `content`; vLLM's name is `prompt`"),
        ("compat_oai_responses::responses_with_openai_library", _STORIES),
        # only if the answer ends by itself within eight tokens, which is left to chance
        ("compat_oai_responses::responses_stream_with_openai_library", _STORIES),
        ("compat_oai_responses::responses_stream_with_llama_telemetry", _NATIVE),
        ("metrics::*", _NATIVE),
    ],
    "llama.cpp-keys": [
        ("security::access_static_assets_without_api_key", _NATIVE),
        ("security::correct_api_key", _NATIVE),
        ("security::correct_api_key_anthropic_header", "Anthropic's header is not taken"),
        ("security::openai_library_correct_api_key", "asks for paths without /v1"),
        ("security::cors_proxy*", _NATIVE),
        ("security::cors_*", _CORS),
        ("security::local_media_file", "no images"),
    ],
    "vllm": [
        ("completion::single_completion", _ASKED),
        ("completion::completion_truncation_side*", _WIRE),
        ("completion::zero_logprobs", "here logprobs 0 has no list beside the chosen token"),
        ("completion::logprob_token_ids*", _WIRE),
        ("completion::prompt_logprobs_completion[Qwen/Qwen3-0.6B-None]", _ASKED),
        ("completion::batch_completions", _WIRE),
        ("completion::echo_logprob_completion", "asks for Qwen's tokens, or for a list beside logprobs 0"),
        ("completion::completion_request_*", _INSIDE),
        ("token_in_token_out::*", _INSIDE),
        ("prompt_validation::empty_prompt", "asks for vLLM's words"),
        ("prompt_validation::out_of_vocab_token_ids", "asks for vLLM's words"),
        ("prompt_validation::*_prompt_embeds", _INSIDE),
        ("chat::prompt_logprobs_chat[HuggingFaceH4/zephyr-7b-beta-None]", _ASKED),
        ("chat::more_than_one_prompt_logprobs_chat", _ASKED),
        ("chat::single_chat_session", "here usage always tells the cached tokens"),
        ("chat::structured_outputs_choice_chat", _TRAINED),
        ("chat::structured_outputs_json_chat", _LONG),
        ("chat::structured_outputs_regex_chat", "asks that two samples differ, which is left to chance"),
        ("chat::response_format_json_*", _TRAINED),
        ("chat::complex_message_content", _TRAINED),
        ("chat::long_seed", _INSIDE),
        ("chat::invocations", "SageMaker's path"),
        ("chat::chat_completion_request_*", _INSIDE),
        ("chat::null_top_logprobs_is_same_as_omitted", _INSIDE),
        ("chat_completion::kv_transfer_*", _WIRE),
        ("chat_completion::per_request_metrics_*", _WIRE),
        ("chat_echo::chat_session_with_echo_and_continue_final_message[test_case0]", _WIRE),
        ("chat_echo::chat_session_with_echo_and_continue_final_message[test_case1]", _TRAINED),
        ("chat_echo::*_logprobs", "asks for the whole vocabulary by -1"),
        ("chat_logit_bias_validation::chat_logit_bias_valid", _INSIDE),
        ("chat_logit_bias_validation::chat_logit_bias_invalid", _INSIDE),
        (
            "chat_logit_bias_validation::chat_logit_bias_multiple_non_integer_keys",
            "here the first wrong key is named",
        ),
        ("return_token_ids::basic_completion_with_emoji[False]", _ASKED),
        ("return_token_ids::basic_completion_with_emoji[None]", _ASKED),
        ("return_token_ids::chat_completion_with_*", "asks for Qwen's chat template"),
        ("return_token_ids::comparison_with_*", "here echo with logprobs has the prompt's; both are refused"),
        ("completion_with_function_calling::function_tool_use[*-auto-*", _TRAINED),
        ("completion_with_function_calling::function_tool_use[plain-True-*", _TRAINED),
        ("completion_with_function_calling::function_tool_use[watermarked-True-*", _TRAINED),
        ("completion_with_function_calling::named_tool_use", _LONG),
        (
            "completion_with_function_calling::max_tokens_with_tool_choice_required[tool_choice1]",
            "here a named call that was cut has the arguments so far, with finish_reason length",
        ),
        ("chunked_prompt::*", _LONG),
        ("enable_force_include_usage::*", "an option that vLLM's server is started with"),
        ("return_tokens_as_ids::*", _WIRE),
        ("models::check_models", "asks for one name; this server has many here"),
        ("tokenization::tokenize_completions", _LONG),
        ("tokenization::tokenize_chat*", _INSIDE),
        ("tokenization::tokenize_with_return_token_strs", _INSIDE),
        ("basic::show_version", _INSIDE),
        ("basic::request_cancellation", _LONG),
        ("basic::server_load", "vLLM's own path"),
        ("basic::health_check_engine_dead_error", _INSIDE),
    ],
}
