// The model of a tokenizer.json, of type BPE: a word becomes its characters (or bytes), and
// neighbours are merged in the order of the merge list until no merge applies. Covers byte-level
// BPE (GPT-2, Llama 3, Qwen) and the SentencePiece style with byte fallback (Llama 2, Mistral).
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "engine/text/json_node.h"
#include "engine/text/vocabulary.h"

namespace stretto::engine {

// Immutable and thread-safe; what changes while encoding lives in a BpeEncoder.
class Bpe {
 public:
  // `node` is the "model" section.
  static absl::StatusOr<Bpe> FromJson(const JsonNode& node);

  const Vocabulary& vocabulary() const { return vocabulary_; }
  int32_t unk_id() const { return unk_id_; }

 private:
  friend class BpeEncoder;
  struct Merge {
    int32_t rank = 0, new_id = 0;
  };
  static uint64_t PairKey(int32_t left, int32_t right) {
    return uint64_t{static_cast<uint32_t>(left)} << 32 | static_cast<uint32_t>(right);
  }
  absl::Status ReadVocabulary(const JsonNode& node);
  absl::Status ReadOptions(const JsonNode& node);
  absl::Status ReadMerges(const JsonNode& node);
  absl::Status AddMerge(const JsonNode& where, int32_t rank, absl::string_view left,
                        absl::string_view right);
  void IndexCharacters();
  int32_t FindCharacter(absl::string_view character) const;

  Vocabulary vocabulary_;
  absl::flat_hash_map<uint64_t, Merge> merges_;
  std::array<int32_t, 0x180> low_characters_{};  // ids of one-character tokens below U+0180
  std::array<int32_t, 256> byte_ids_{};          // ids of <0x00> to <0xFF>; -1 where missing
  std::string continuing_prefix_, end_of_word_suffix_;
  int32_t unk_id_ = -1;
  bool byte_fallback_ = false;
  bool fuse_unk_ = false;
  bool ignore_merges_ = false;  // a word that is a token needs no merging
};

// Encodes words, remembering those it has seen. Used by one thread at a time.
class BpeEncoder {
 public:
  explicit BpeEncoder(const Bpe& bpe) : bpe_(bpe) {}
  // Appends the ids of `word` (valid UTF-8, not empty). O(n log n).
  void Encode(absl::string_view word, std::vector<int32_t>* ids);

 private:
  struct Symbol {
    int32_t id;
    int32_t previous, next;  // indices into symbols_, -1 at the ends
    bool alive;
  };
  struct Candidate {
    int32_t rank, position, new_id;
    bool operator<(const Candidate& other) const {  // std heaps keep the largest on top
      return rank != other.rank ? rank > other.rank : position > other.position;
    }
  };
  void MakeSymbols(absl::string_view word);
  int32_t FindSymbol(absl::string_view character, bool first, bool last);
  void AddSymbol(int32_t id);
  void MergeAll();
  void PushCandidate(int32_t left, int32_t right);

  const Bpe& bpe_;
  std::vector<Symbol> symbols_;
  std::vector<Candidate> heap_;
  absl::flat_hash_map<std::string, std::pair<uint32_t, uint32_t>> cache_;  // begin, size in cached_
  std::vector<int32_t> cached_;
};

}  // namespace stretto::engine
