// What a completion may say: an automaton over the bytes of its text, and for each of its states
// the tokens that lead to another state. A token is allowed where all of its bytes are; so every
// completion that goes on as allowed is the beginning of a match. Only texts count whose every byte
// is a token by itself, so that from everywhere some tokens lead to a match.
//
// Immutable but for a cache of masks; thread-safe. Shared by the requests that ask for the same.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "engine/constrain/automaton.h"
#include "engine/constrain/token_trie.h"

namespace stretto::engine {
// Bit i: token i is allowed.
struct TokenMask {
  std::vector<uint64_t> bits;
  int32_t count = 0;
  bool Allows(int32_t token) const {
    const auto word = static_cast<size_t>(token) / 64;
    return word < bits.size() && (bits[word] >> (static_cast<size_t>(token) % 64) & 1) != 0;
  }
};

struct ConstraintSpec {
  enum class Kind { kRegex, kJsonSchema, kJsonObject };
  Kind kind = Kind::kRegex;
  std::string text;       // the expression or the schema
  std::string name = {};  // in errors, where it isn't the kind's
};
// What one of these texts matches and nothing else. InvalidArgument speaks of the texts: there are
// none, too many bytes of them, or one isn't UTF-8.
absl::StatusOr<ConstraintSpec> SpecOfTexts(absl::Span<const std::string> texts);

class Constraint {
 public:
  using State = Automaton::State;  // of a completion's text so far; the start is 0
  static constexpr State kDead = Automaton::kDead;

  // InvalidArgument with the reason and the place: the text can't be read, is too large or complex,
  // or matches nothing that the vocabulary can write but the empty text. Blocks while it compiles:
  // up to about a second for what is refused in the end. CANCELLED: `cancelled`, asked now and
  // then, says that nobody wants it.
  static absl::StatusOr<std::shared_ptr<const Constraint>> Compile(
      const ConstraintSpec& spec, std::shared_ptr<const TokenTrie> trie,
      const AutomatonLimits& limits = {}, const std::function<bool()>& cancelled = nullptr);

  State start() const { return automaton_.start(); }
  int32_t vocab_size() const { return trie_->vocab_size(); }
  // Whether a token stands for text. Those that don't are never allowed by themselves.
  bool HasText(int32_t token) const {
    return token < trie_->vocab_size() && !trie_->bytes(token).empty();
  }
  // The state after a token, kDead if it isn't allowed.
  State Next(State state, int32_t token) const;
  // Whether the completion may end here; and whether it must.
  bool MayEnd(State state) const { return automaton_.Accepts(state); }
  bool MustEnd(State state) const { return automaton_.IsEnd(state); }
  std::shared_ptr<const TokenMask> Mask(State state) const;

 private:
  Constraint(Automaton automaton, std::shared_ptr<const TokenTrie> trie)
      : automaton_(std::move(automaton)), trie_(std::move(trie)) {}
  std::shared_ptr<const TokenMask> ComputeMask(State state) const;

  const Automaton automaton_;
  const std::shared_ptr<const TokenTrie> trie_;
  mutable absl::Mutex mutex_;
  mutable absl::flat_hash_map<State, std::shared_ptr<const TokenMask>> masks_
      ABSL_GUARDED_BY(mutex_);
};

struct ConstraintCacheOptions {
  size_t capacity = 32;      // constraints, and as many texts that can't be compiled
  size_t max_compiling = 2;  // at once, so that callers can't take all of a machine's cores
  size_t max_waiting = 32;   // different ones, for their turn
};

// Compiled constraints by their text, and why others can't be compiled; the least recently used
// forgotten first. Who asks for what is being compiled waits for that. Thread-safe.
class ConstraintCache {
 public:
  using TrieFactory = std::function<std::shared_ptr<const TokenTrie>()>;
  using Result = absl::StatusOr<std::shared_ptr<const Constraint>>;
  // `make_trie` is called at the first use.
  explicit ConstraintCache(TrieFactory make_trie, const ConstraintCacheOptions& options = {})
      : make_trie_(std::move(make_trie)), options_(options) {}
  // Errors of Compile. RESOURCE_EXHAUSTED: too many wait already. CANCELLED: `gone`, asked now and
  // then, says that nobody wants the answer; what is compiled here goes on while others wait for
  // it.
  Result Get(const ConstraintSpec& spec, const std::function<bool()>& gone = {});

 private:
  struct Entry {
    Result result;
    uint64_t last_use = 0;
  };
  using Entries = absl::flat_hash_map<std::string, Entry>;
  const Result* Find(const std::string& key) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool IsNext(uint64_t ticket, const std::string& key) const ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  // OK: it is this call's turn, or the result is there.
  absl::Status AwaitTurn(const std::string& key, const std::function<bool()>& gone)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Remember(const std::string& key, const Result& result) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool IsAwaited(const std::string& key);
  std::shared_ptr<const TokenTrie> Trie();

  const TrieFactory make_trie_;
  const ConstraintCacheOptions options_;
  absl::Mutex trie_mutex_;
  std::shared_ptr<const TokenTrie> trie_ ABSL_GUARDED_BY(trie_mutex_);
  absl::Mutex mutex_;
  uint64_t num_uses_ ABSL_GUARDED_BY(mutex_) = 0, num_tickets_ ABSL_GUARDED_BY(mutex_) = 0;
  Entries compiled_ ABSL_GUARDED_BY(mutex_), refused_ ABSL_GUARDED_BY(mutex_);
  std::set<std::string> compiling_ ABSL_GUARDED_BY(mutex_);
  std::map<uint64_t, std::string> waiting_ ABSL_GUARDED_BY(mutex_);  // keys, in order
};
}  // namespace stretto::engine
