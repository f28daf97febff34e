#include "engine/constrain/constraint.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/status.h"
#include "engine/constrain/json_patterns.h"
#include "engine/constrain/json_schema.h"
#include "engine/constrain/regex.h"

namespace stretto::engine {
namespace {
constexpr size_t kMaxMaskBytes = size_t{8} << 20;      // of one constraint's cache
constexpr size_t kMaxRefusedBytes = size_t{64} << 10;  // of a text whose refusal is remembered
constexpr absl::Duration kPoll =
    absl::Milliseconds(20);  // how soon it shows that a caller has gone

absl::StatusOr<Automaton> CompileSpec(const ConstraintSpec& spec, int max_nesting,
                                      AutomatonLimits limits, const Automaton::Bytes& allowed,
                                      const std::function<bool()>& cancelled, bool* is_recursive) {
  Work work(Work::kMaxSteps, cancelled);
  limits.work = &work;
  absl::StatusOr<PatternPtr> pattern = absl::InvalidArgumentError("unknown kind of constraint");
  switch (spec.kind) {
    case ConstraintSpec::Kind::kRegex:
      pattern = ParseRegex(spec.text, RegexMatch::kWhole, RegexText::kPlain, limits.work);
      break;
    case ConstraintSpec::Kind::kJsonSchema:
      pattern = ParseJsonSchema(spec.text, max_nesting, is_recursive, limits.work);
      break;
    case ConstraintSpec::Kind::kJsonObject:
      pattern = AnyJsonObject();
      break;
  }
  if (!pattern.ok()) return pattern.status();
  absl::StatusOr<Automaton> automaton = Automaton::Compile(**pattern, limits, allowed);
  if (work.is_used_up() && work.is_mostly_in_places()) return work.Status();
  return automaton;
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
    const AutomatonLimits& limits, const std::function<bool()>& cancelled) {
  const std::string name = !spec.name.empty()                               ? spec.name
                           : spec.kind == ConstraintSpec::Kind::kRegex      ? "regex"
                           : spec.kind == ConstraintSpec::Kind::kJsonSchema ? "json_schema"
                                                                            : "json_object";
  bool is_recursive = false;
  const auto compile = [&](int max_nesting) {
    return CompileSpec(spec, max_nesting, limits, trie->single_bytes(), cancelled, &is_recursive);
  };
  auto automaton = compile(kMaxRefNesting);
  if (absl::IsInvalidArgument(automaton.status()) && is_recursive) {
    automaton = compile(kLeastRefNesting);
  }
  if (!automaton.ok()) return Annotate(automaton.status(), name);
  if (automaton->IsEnd(automaton->start())) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, ": nothing that this vocabulary can write matches it but no text"));
  }
  return std::shared_ptr<const Constraint>(new Constraint(*std::move(automaton), std::move(trie)));
}

Constraint::State Constraint::Next(State state, int32_t token) const {
  if (state == kDead || token < 0 || token >= trie_->vocab_size()) return kDead;
  const std::string& bytes = trie_->bytes(token);
  if (bytes.empty()) return kDead;
  for (const char byte : bytes) {
    state = automaton_.Next(state, static_cast<uint8_t>(byte));
    if (state == kDead) return kDead;
  }
  return state;
}

std::shared_ptr<const TokenMask> Constraint::Mask(State state) const {
  // Far from every decision, as within a long string, one mask serves any count.
  state = automaton_.Representative(state, trie_->max_bytes());
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
std::shared_ptr<const TokenMask> Constraint::ComputeMask(State state) const {
  auto mask = std::make_shared<TokenMask>();
  mask->bits.resize((static_cast<size_t>(trie_->vocab_size()) + 63) / 64);
  const absl::Span<const TrieNode> nodes = trie_->nodes();
  const absl::Span<const int32_t> tokens = trie_->tokens();
  std::vector<State> states{state};  // by depth
  for (int32_t n = 0; n < static_cast<int32_t>(nodes.size());) {
    const TrieNode& node = nodes[n];
    states.resize(static_cast<size_t>(node.depth));
    const State next = automaton_.Next(states.back(), node.byte);
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

const ConstraintCache::Result* ConstraintCache::Find(const std::string& key) {
  for (Entries* entries : {&compiled_, &refused_}) {
    const auto found = entries->find(key);
    if (found == entries->end()) continue;
    found->second.last_use = ++num_uses_;
    return &found->second.result;
  }
  return nullptr;
}

void ConstraintCache::Remember(const std::string& key, const Result& result) {
  if (!result.ok() && key.size() > kMaxRefusedBytes) return;
  Entries& entries = result.ok() ? compiled_ : refused_;
  if (entries.size() >= options_.capacity) {
    entries.erase(std::min_element(
        entries.begin(), entries.end(),
        [](const auto& a, const auto& b) { return a.second.last_use < b.second.last_use; }));
  }
  entries[key] = {result, ++num_uses_};
}

// In order, but for those who wait for what is being compiled: they hold up nobody.
bool ConstraintCache::IsNext(uint64_t ticket, const std::string& key) const {
  if (compiling_.size() >= options_.max_compiling || compiling_.contains(key)) return false;
  for (const auto& [earlier, other] : waiting_) {
    if (!compiling_.contains(other)) return earlier == ticket;
  }
  return true;
}

absl::Status ConstraintCache::AwaitTurn(const std::string& key, const std::function<bool()>& gone) {
  const uint64_t ticket = num_tickets_++;
  const auto done = [&]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return IsNext(ticket, key) || compiled_.contains(key) || refused_.contains(key);
  };
  if (done()) return absl::OkStatus();
  std::set<absl::string_view> keys;
  for (const auto& [earlier, other] : waiting_) {
    if (!compiling_.contains(other)) keys.insert(other);
  }
  if (keys.size() >= options_.max_waiting && !keys.contains(key) && !compiling_.contains(key)) {
    return absl::ResourceExhaustedError(
        absl::StrCat(keys.size(), " others wait to be compiled already: try again in a second"));
  }
  waiting_.emplace(ticket, key);
  absl::Status status;
  while (status.ok() && !mutex_.AwaitWithTimeout(absl::Condition(&done), kPoll)) {
    if (gone && gone()) status = absl::CancelledError("nobody waits for the constraint any more");
  }
  waiting_.erase(ticket);
  return status;
}

bool ConstraintCache::IsAwaited(const std::string& key) {
  absl::MutexLock lock(&mutex_);
  return std::any_of(waiting_.begin(), waiting_.end(),
                     [&](const auto& waiting) { return waiting.second == key; });
}

std::shared_ptr<const TokenTrie> ConstraintCache::Trie() {
  absl::MutexLock lock(&trie_mutex_);
  if (trie_ == nullptr) trie_ = make_trie_();
  return trie_;
}

ConstraintCache::Result ConstraintCache::Get(const ConstraintSpec& spec,
                                             const std::function<bool()>& gone) {
  // With the name: errors speak of it.
  const std::string key = absl::StrCat(static_cast<int>(spec.kind), spec.name, ":", spec.text);
  {
    absl::MutexLock lock(&mutex_);
    if (const Result* known = Find(key)) return *known;
    RETURN_IF_ERROR(AwaitTurn(key, gone));
    if (const Result* known = Find(key)) return *known;
    compiling_.insert(key);
  }
  const auto cancelled = [&] { return gone && gone() && !IsAwaited(key); };
  Result result = Constraint::Compile(spec, Trie(), {}, cancelled);
  absl::MutexLock lock(&mutex_);
  compiling_.erase(key);
  if (!absl::IsCancelled(result.status())) Remember(key, result);
  return result;
}
}  // namespace stretto::engine
