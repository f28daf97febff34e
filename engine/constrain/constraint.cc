#include "engine/constrain/constraint.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "engine/constrain/json_schema.h"
#include "engine/constrain/regex.h"

namespace stretto::engine {
namespace {
constexpr size_t kMaxMaskBytes = size_t{8} << 20;  // of one constraint's cache

absl::StatusOr<Automaton> CompileSpec(const ConstraintSpec& spec, int max_nesting,
                                      const AutomatonLimits& limits,
                                      const Automaton::Bytes& allowed, bool* is_recursive) {
  absl::StatusOr<PatternPtr> pattern = absl::InvalidArgumentError("unknown kind of constraint");
  switch (spec.kind) {
    case ConstraintSpec::Kind::kRegex:
      pattern = ParseRegex(spec.text, RegexMatch::kWhole);
      break;
    case ConstraintSpec::Kind::kJsonSchema:
      pattern = ParseJsonSchema(spec.text, max_nesting, is_recursive);
      break;
    case ConstraintSpec::Kind::kJsonObject:
      pattern = AnyJsonObject();
      break;
  }
  if (!pattern.ok()) return pattern.status();
  return Automaton::Compile(**pattern, limits, allowed);
}
}  // namespace

absl::StatusOr<ConstraintSpec> SpecOfTexts(absl::Span<const std::string> texts) {
  if (texts.empty()) return absl::InvalidArgumentError("choice: expected at least one text");
  size_t num_bytes = 0;
  for (size_t i = 0; i < texts.size(); ++i) {
    num_bytes += texts[i].size();
    const absl::Status status =
        texts[i].size() <= kMaxRegexBytes / 2
            ? ParseRegex(RegexOfTexts(texts.subspan(i, 1)), RegexMatch::kWhole).status()
            : absl::OkStatus();
    if (!status.ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat("choice: text ", i + 1, " of ", texts.size(), " isn't valid UTF-8"));
    }
  }
  ConstraintSpec spec{ConstraintSpec::Kind::kRegex, RegexOfTexts(texts), "choice"};
  if (spec.text.size() <= kMaxRegexBytes) return spec;
  return absl::InvalidArgumentError(absl::StrCat(
      "choice: the ", texts.size(), " texts have ", num_bytes, " bytes, more than fit: up to ",
      kMaxRegexBytes, " together, where punctuation counts double"));
}

absl::StatusOr<std::shared_ptr<const Constraint>> Constraint::Compile(
    const ConstraintSpec& spec, std::shared_ptr<const TokenTrie> trie,
    const AutomatonLimits& limits) {
  const std::string name = !spec.name.empty()                               ? spec.name
                           : spec.kind == ConstraintSpec::Kind::kRegex      ? "regex"
                           : spec.kind == ConstraintSpec::Kind::kJsonSchema ? "json_schema"
                                                                            : "json_object";
  bool is_recursive = false;
  auto automaton = CompileSpec(spec, kMaxRefNesting, limits, trie->single_bytes(), &is_recursive);
  if (!automaton.ok() && is_recursive) {
    automaton = CompileSpec(spec, kLeastRefNesting, limits, trie->single_bytes(), &is_recursive);
  }
  if (!automaton.ok()) return Annotate(automaton.status(), name);
  if (automaton->IsEnd(automaton->start())) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, ": nothing that this vocabulary can write matches it but no text"));
  }
  return std::shared_ptr<const Constraint>(new Constraint(*std::move(automaton), std::move(trie)));
}

int32_t Constraint::Next(int32_t state, int32_t token) const {
  if (state == kDead || token < 0 || token >= trie_->vocab_size()) return kDead;
  const std::string& bytes = trie_->bytes(token);
  if (bytes.empty()) return kDead;
  for (const char byte : bytes) {
    state = automaton_.Next(state, static_cast<uint8_t>(byte));
    if (state == kDead) return kDead;
  }
  return state;
}

std::shared_ptr<const TokenMask> Constraint::Mask(int32_t state) const {
  {
    absl::MutexLock lock(&mutex_);
    const auto found = masks_.find(state);
    if (found != masks_.end()) return found->second;
  }
  std::shared_ptr<const TokenMask> mask = ComputeMask(state);
  absl::MutexLock lock(&mutex_);
  if ((masks_.size() + 1) * mask->bits.size() * sizeof(uint64_t) > kMaxMaskBytes) masks_.clear();
  return masks_.try_emplace(state, std::move(mask)).first->second;
}

// Walks the trie; where the automaton dies, the whole subtree is left out.
std::shared_ptr<const TokenMask> Constraint::ComputeMask(int32_t state) const {
  auto mask = std::make_shared<TokenMask>();
  mask->bits.resize((static_cast<size_t>(trie_->vocab_size()) + 63) / 64);
  const absl::Span<const TrieNode> nodes = trie_->nodes();
  const absl::Span<const int32_t> tokens = trie_->tokens();
  std::vector<int32_t> states{state};  // by depth
  for (int32_t n = 0; n < static_cast<int32_t>(nodes.size());) {
    const TrieNode& node = nodes[n];
    states.resize(static_cast<size_t>(node.depth));
    const int32_t next = automaton_.Next(states.back(), node.byte);
    if (next == kDead) {
      n = node.end;
      continue;
    }
    states.push_back(next);
    for (int32_t t = node.tokens_begin; t < node.tokens_end; ++t) {
      const auto token = static_cast<size_t>(tokens[t]);
      mask->bits[token / 64] |= uint64_t{1} << (token % 64);
      ++mask->count;
    }
    ++n;
  }
  return mask;
}

std::shared_ptr<const Constraint> ConstraintCache::Find(const std::string& key) {
  absl::MutexLock lock(&mutex_);
  const auto found = entries_.find(key);
  if (found == entries_.end()) return nullptr;
  found->second.last_use = ++num_uses_;
  return found->second.constraint;
}

absl::StatusOr<std::shared_ptr<const Constraint>> ConstraintCache::Get(const ConstraintSpec& spec) {
  const std::string key = absl::StrCat(static_cast<int>(spec.kind), spec.text);
  if (auto found = Find(key)) return found;
  absl::MutexLock compile_lock(&compile_mutex_);
  if (auto found = Find(key)) return found;  // compiled while this call waited
  if (trie_ == nullptr) trie_ = make_trie_();
  ASSIGN_OR_RETURN(auto constraint, Constraint::Compile(spec, trie_));
  absl::MutexLock lock(&mutex_);
  if (entries_.size() >= capacity_) {
    entries_.erase(std::min_element(
        entries_.begin(), entries_.end(),
        [](const auto& a, const auto& b) { return a.second.last_use < b.second.last_use; }));
  }
  entries_[key] = {constraint, ++num_uses_};
  return constraint;
}
}  // namespace stretto::engine
