// What a process says when nothing above can: an allocation or a thread that isn't to be had where
// no caller can answer, and a mapped file that became shorter, or can't be read, while it is read.
// Without this such ends have no word of what was missing.
#pragma once

#include <cstddef>

namespace stretto {
// From here on: no memory or no thread ends the process with exit code 1, a mapped file that can't
// be read with `file_exit_code`; both say why on stderr after "`program`: ". What nobody expected
// still aborts. `program` outlives the process.
void InstallLastWords(const char* program, int file_exit_code);

// A mapping whose file is to be named; `path` lives as long as it. Any thread.
void NoteMapping(const void* begin, size_t size, const char* path);
void ForgetMapping(const void* begin);
}  // namespace stretto
