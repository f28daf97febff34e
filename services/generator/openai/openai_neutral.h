// Fields of OpenAI's and vLLM's requests that mean nothing here, or something that isn't here.
// Client libraries send many of them always, with the value that changes nothing: such values are
// taken. Any other would promise what isn't kept, and is refused by the field's name.
#pragma once

#include "services/generator/openai/openai_fields.h"

namespace stretto::services {
// Those of both kinds of request. `n`: the choices asked for, which best_of may repeat.
void TakeNeutralFields(Fields& fields, int n);
void TakeNeutralCompletionFields(Fields& fields);
void TakeNeutralChatFields(Fields& fields);
}  // namespace stretto::services
