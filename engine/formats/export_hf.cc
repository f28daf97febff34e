#include "engine/formats/export_hf.h"

#include <unistd.h>

#include <algorithm>
#include <set>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "engine/formats/safetensors.h"

namespace stretto::engine {
namespace {
constexpr int64_t kPieceBytes = int64_t{4} << 20;

absl::Status WriteTensor(const TensorSpec& spec, DType type, const RowReader& read,
                         SafetensorsWriter& writer, std::vector<uint8_t>& piece) {
  const int64_t row_bytes = spec.shape.back() * static_cast<int64_t>(SizeOf(type));
  const int64_t num_rows = spec.shape.size() > 1 ? spec.shape[0] : 1;
  const int64_t rows_a_piece = std::max<int64_t>(1, kPieceBytes / row_bytes);
  for (int64_t begin = 0; begin < num_rows; begin += rows_a_piece) {
    const int64_t end = std::min(num_rows, begin + rows_a_piece);
    piece.resize(static_cast<size_t>((end - begin) * row_bytes));
    RETURN_IF_ERROR(Annotate(read(spec, begin, end, type, piece.data()), spec.name));
    RETURN_IF_ERROR(writer.Append(piece));
  }
  return absl::OkStatus();
}

absl::Status WriteWeights(Files& files, const std::string& path, const ExportOptions& options,
                          const RowReader& read) {
  const std::vector<TensorSpec> specs = ExpectedTensors(options.config);
  std::vector<SafetensorsWriter::Tensor> tensors;
  std::map<absl::string_view, const TensorSpec*> by_name;
  for (const TensorSpec& spec : specs) {
    tensors.push_back({spec.name, options.type, spec.shape});
    by_name[spec.name] = &spec;
  }
  ASSIGN_OR_RETURN(auto writer, SafetensorsWriter::Create(files, path, std::move(tensors)));
  std::vector<uint8_t> piece;
  for (const auto& tensor : writer->tensors()) {
    RETURN_IF_ERROR(WriteTensor(*by_name.at(tensor.name), options.type, read, *writer, piece));
  }
  return writer->Finish();
}

absl::Status WriteTokenizer(Files& files, const std::string& folder, const ExportOptions& options) {
  std::map<std::string, std::string> contents = options.tokenizer_files;
  if (!options.tokenizer_folder.empty()) {
    for (const std::string& name : TokenizerFileNames()) {
      const std::string from = JoinPath(options.tokenizer_folder, name);
      if (contents.contains(name) || !files.Exists(from)) continue;
      ASSIGN_OR_RETURN(contents[name], files.ReadAll(from));
    }
  }
  for (const auto& [name, content] : contents) {
    RETURN_IF_ERROR(files.WriteAtomically(JoinPath(folder, name), content));
  }
  return absl::OkStatus();
}

absl::Status WriteFolder(Files& files, const std::string& folder, const ExportOptions& options,
                         const RowReader& read) {
  RETURN_IF_ERROR(files.MakeDirs(folder));
  RETURN_IF_ERROR(files.WriteAtomically(JoinPath(folder, "config.json"),
                                        ToHfConfigJson(options.config, options.type)));
  RETURN_IF_ERROR(
      files.WriteAtomically(JoinPath(folder, "generation_config.json"),
                            ToHfGenerationConfigJson(options.config, options.generation)));
  RETURN_IF_ERROR(WriteTokenizer(files, folder, options));
  return WriteWeights(files, JoinPath(folder, "model.safetensors"), options, read);
}

// A folder cannot be renamed over one that has content: the old one steps aside first and comes
// back if the new one does not make it.
absl::Status PutInPlace(Files& files, const std::string& from, const std::string& to) {
  if (!files.Exists(to)) return files.Rename(from, to);
  const std::string aside = absl::StrCat(to, ".old.", ::getpid());
  RETURN_IF_ERROR(files.Rename(to, aside));
  const absl::Status status = files.Rename(from, to);
  if (!status.ok()) {
    (void)files.Rename(aside, to);
    return status;
  }
  return files.RemoveAll(aside);
}
}  // namespace

const std::vector<std::string>& TokenizerFileNames() {
  static const auto* names = new std::vector<std::string>{"tokenizer.json",
                                                          "tokenizer_config.json",
                                                          "special_tokens_map.json",
                                                          "added_tokens.json",
                                                          "vocab.json",
                                                          "merges.txt",
                                                          "tokenizer.model",
                                                          "chat_template.jinja"};
  return *names;
}

absl::Status CheckReplaceable(Files& files, const std::string& path) {
  if (!files.Exists(path)) return absl::OkStatus();
  std::set<std::string> written = {"config.json", "generation_config.json", "model.safetensors"};
  written.insert(TokenizerFileNames().begin(), TokenizerFileNames().end());
  ASSIGN_OR_RETURN(const std::vector<std::string> names, files.List(path));
  for (const std::string& name : names) {
    if (!written.contains(name)) {
      return absl::FailedPreconditionError(
          absl::StrCat("export folder \"", path, "\" holds ", name,
                       ", which no export has written: it is not replaced; choose another folder"));
    }
  }
  return absl::OkStatus();
}

absl::Status ExportHf(Files& files, const ExportOptions& options, const RowReader& read) {
  if (options.type != DType::kBF16 && options.type != DType::kF32) {
    return absl::InvalidArgumentError(
        absl::StrCat("export as ", Name(options.type), ", expected bf16 or f32"));
  }
  std::string path = options.path;
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  if (path.empty() || (!options.overwrite && files.Exists(path))) {
    return absl::AlreadyExistsError(absl::StrCat(
        "export folder \"", path, "\" exists already (--overwrite replaces it) or has no name"));
  }
  RETURN_IF_ERROR(CheckReplaceable(files, path));
  RETURN_IF_ERROR(ValidateConfig(path, options.config));
  const std::string temporary = absl::StrCat(path, ".tmp.", ::getpid());
  RETURN_IF_ERROR(files.RemoveAll(temporary));
  absl::Status status = WriteFolder(files, temporary, options, read);
  if (status.ok()) status = PutInPlace(files, temporary, path);
  if (!status.ok()) (void)files.RemoveAll(temporary);
  return status;
}
}  // namespace stretto::engine
