# stretto_library(NAME SRCS … DEPS … [PRIVATE_DEPS …]): a static library of one folder.
# stretto_binary(NAME SRCS … DEPS …): a program, placed in build/bin.
# stretto_test(NAME SRCS … DEPS … [LABELS …] [TIMEOUT s]): a Catch2 program, registered with CTest.
# stretto_fuzz(NAME SRCS … DEPS … CORPUS folder): a target with LLVMFuzzerTestOneInput. Under the
#   preset `fuzz` it is a libFuzzer program; else a test (label fuzz) that replays the corpus and
#   some thousand seeded mutations of it.
if(STRETTO_FUZZ)
  target_compile_options(stretto_flags INTERFACE -fsanitize=fuzzer-no-link)
endif()

# What ThreadSanitizer needs in every program.
set(STRETTO_PROGRAM_LIBS "")
if(STRETTO_SANITIZE MATCHES "thread")
  add_library(stretto_tsan_mutex OBJECT ${CMAKE_SOURCE_DIR}/cmake/tsan_mutex.cc)
  target_link_libraries(stretto_tsan_mutex PRIVATE stretto_flags absl::synchronization)
  set(STRETTO_PROGRAM_LIBS stretto_tsan_mutex)
endif()

function(stretto_library name)
  cmake_parse_arguments(A "" "" "SRCS;DEPS;PRIVATE_DEPS" ${ARGN})
  add_library(${name} STATIC ${A_SRCS})
  target_link_libraries(${name} PUBLIC stretto_flags ${A_DEPS} PRIVATE ${A_PRIVATE_DEPS})
  stretto_precompiled(${name} "" ${A_DEPS} ${A_PRIVATE_DEPS})
endfunction()

function(stretto_binary name)
  cmake_parse_arguments(A "" "" "SRCS;DEPS" ${ARGN})
  add_executable(${name} ${A_SRCS})
  target_link_libraries(${name} PRIVATE stretto_flags ${STRETTO_PROGRAM_LIBS} ${A_DEPS})
  stretto_precompiled(${name} "" ${A_DEPS})
endfunction()

function(stretto_test name)
  if(NOT STRETTO_BUILD_TESTS)
    return()
  endif()
  cmake_parse_arguments(A "" "TIMEOUT" "SRCS;DEPS;LABELS" ${ARGN})
  add_executable(${name} ${A_SRCS})
  target_link_libraries(${name} PRIVATE stretto_flags ${STRETTO_PROGRAM_LIBS} stretto_test_flags stretto_test_main ${A_DEPS})
  stretto_precompiled(${name} test_ ${A_DEPS})
  target_compile_definitions(${name} PRIVATE
    STRETTO_SOURCE_DIR="${CMAKE_SOURCE_DIR}" STRETTO_BINARY_DIR="${CMAKE_BINARY_DIR}")
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests)
  add_test(NAME ${name} COMMAND ${name})
  if(NOT A_TIMEOUT)
    set(A_TIMEOUT 120)
  endif()
  # A test asks for more memory than any machine has, and a null pointer must be the answer; a
  # sanitizer's finding is a failure.
  set_tests_properties(${name} PROPERTIES TIMEOUT ${A_TIMEOUT} LABELS "${A_LABELS}"
    ENVIRONMENT "ASAN_OPTIONS=allocator_may_return_null=1;UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1;TSAN_OPTIONS=suppressions=${CMAKE_SOURCE_DIR}/cmake/tsan_suppressions.txt")
endfunction()

function(stretto_fuzz name)
  if(NOT STRETTO_BUILD_TESTS)
    return()
  endif()
  cmake_parse_arguments(A "" "CORPUS" "SRCS;DEPS" ${ARGN})
  add_executable(${name} ${A_SRCS})
  target_link_libraries(${name} PRIVATE stretto_flags ${STRETTO_PROGRAM_LIBS} ${A_DEPS})
  stretto_precompiled(${name} "" ${A_DEPS})
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests)
  if(STRETTO_FUZZ)
    target_link_options(${name} PRIVATE -fsanitize=fuzzer)
    return()
  endif()
  target_sources(${name} PRIVATE ${CMAKE_SOURCE_DIR}/tests/fuzz/standalone_main.cc)
  target_link_libraries(${name} PRIVATE stretto_base)
  add_test(NAME ${name} COMMAND ${name} ${CMAKE_CURRENT_SOURCE_DIR}/${A_CORPUS})
  set_tests_properties(${name} PROPERTIES TIMEOUT 300 LABELS fuzz)
endfunction()
