// Helpers around absl::Status, the error type of every interface of this project.
#pragma once

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"

namespace stretto {
// The same code with "context: " before the message; OK stays OK.
inline absl::Status Annotate(const absl::Status& status, absl::string_view context) {
  if (status.ok()) return status;
  return absl::Status(status.code(), absl::StrCat(context, ": ", status.message()));
}
}  // namespace stretto

#define STRETTO_CONCAT_INNER(a, b) a##b
#define STRETTO_CONCAT(a, b) STRETTO_CONCAT_INNER(a, b)

// Returns from the enclosing function when `expr` is not OK.
#define RETURN_IF_ERROR(expr)                              \
  do {                                                     \
    if (auto status_ = (expr); !status_.ok()) [[unlikely]] \
      return status_;                                      \
  } while (0)

// ASSIGN_OR_RETURN(auto x, F()): x = *F(), or returns F()'s status.
// NOLINTBEGIN(bugprone-macro-parentheses): `lhs` may be a declaration.
#define ASSIGN_OR_RETURN(lhs, expr) \
  ASSIGN_OR_RETURN_IMPL(STRETTO_CONCAT(result_, __LINE__), lhs, expr)
#define ASSIGN_OR_RETURN_IMPL(result, lhs, expr) \
  auto result = (expr);                          \
  if (!result.ok()) [[unlikely]]                 \
    return result.status();                      \
  lhs = std::move(result).value()
// NOLINTEND(bugprone-macro-parentheses)
