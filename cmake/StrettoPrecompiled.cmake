# Precompiled headers: the outside headers that most files include, parsed once for each group of
# targets instead of once a file, for whole builds from nothing (STRETTO_PCH is off by default:
# nobody has built and tested everything with it yet); every file still includes what it uses and builds without.
# Only headers from outside the project (and the generated ones of protos) belong here, so that an
# edit of ours rebuilds only who includes it.
#
# Groups: base, json (with JSON), rpc (with JSON and gRPC), and test_… with Catch2 for each.
option(STRETTO_PCH "Precompile the outside headers, compile tests at -O1" OFF)

set(STRETTO_HEADERS_base
  <algorithm> <atomic> <cmath> <cstdint> <cstdio> <cstring> <functional> <map> <memory> <optional>
  <set> <string> <utility> <vector> <absl/container/flat_hash_map.h> <absl/status/statusor.h>
  <absl/strings/str_cat.h> <absl/synchronization/mutex.h> <absl/types/span.h>)
set(STRETTO_HEADERS_json ${STRETTO_HEADERS_base} <nlohmann/json.hpp>)
set(STRETTO_HEADERS_rpc ${STRETTO_HEADERS_json} <grpcpp/grpcpp.h>
  <stretto/v1/coordinator.grpc.pb.h> <stretto/v1/generator.grpc.pb.h> <stretto/v1/scorer.grpc.pb.h>
  <stretto/v1/trainer.grpc.pb.h> <stretto/v1/weights.grpc.pb.h>)
foreach(group base json rpc)
  set(STRETTO_HEADERS_test_${group} ${STRETTO_HEADERS_${group}} <catch2/catch.hpp>)
endforeach()

# What the code of Catch2 programs is compiled with besides. It is seldom hot, and Catch2's macros
# are slow to optimise.
add_library(stretto_test_flags INTERFACE)

if(STRETTO_PCH)
  # Libraries are static and end in programs: with the same code model both can share a header.
  set(CMAKE_POSITION_INDEPENDENT_CODE OFF)
  add_compile_options(-fPIE)
  add_link_options(-pie)
  target_compile_options(stretto_test_flags INTERFACE $<$<CONFIG:Release>:-O1>)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    add_compile_options(-fpch-preprocess)  # for ccache
    if(CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
      # With a precompiled header GCC 12 gives array-bounds and stringop-overflow where it gives none
      # for the same header as text; their kin are left out as a precaution. Builds without have them.
      target_compile_options(stretto_flags INTERFACE -Wno-array-bounds -Wno-dangling-pointer
        -Wno-free-nonheap-object -Wno-maybe-uninitialized -Wno-mismatched-new-delete -Wno-nonnull
        -Wno-stringop-overflow -Wno-stringop-overread -Wno-use-after-free)
    endif()
  endif()
  if(STRETTO_CCACHE)
    # What ccache's manual asks for ("Precompiled headers"); paths relative to the source tree, so
    # that checkouts share results; depend mode saves a run of the preprocessor.
    set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env CCACHE_BASEDIR=${CMAKE_SOURCE_DIR}
      CCACHE_SLOPPINESS=pch_defines,time_macros CCACHE_DEPEND=1 ${STRETTO_CCACHE})
  endif()
endif()

# stretto_precompiled(TARGET PREFIX DEPS…): the target's files begin with the headers of the group
# that its dependencies suggest; PREFIX is empty or, for Catch2 programs, "test_". Only compile time
# depends on the choice. A source with compiler flags of its own needs the property
# SKIP_PRECOMPILE_HEADERS.
function(stretto_precompiled target prefix)
  if(NOT STRETTO_PCH)
    return()
  endif()
  set(group ${prefix}base)
  if(ARGN MATCHES "stretto_protos|services_(common|engine|generator|scorer|trainer|openai)|\
coordinator_shell|stretto_integration|stretto_cli")
    set(group ${prefix}rpc)
  elseif(ARGN MATCHES "nlohmann_json|engine_text|services_verifiers")
    set(group ${prefix}json)
  endif()
  set(holder stretto_pch_${group})
  if(NOT TARGET ${holder})
    add_library(${holder} OBJECT ${CMAKE_SOURCE_DIR}/cmake/precompiled.cc)
    target_link_libraries(${holder} PRIVATE stretto_flags)
    if(group MATCHES "rpc")
      target_link_libraries(${holder} PRIVATE stretto_protos)
    endif()
    if(prefix STREQUAL "test_")
      target_link_libraries(${holder} PRIVATE stretto_test_flags)
    endif()
    target_precompile_headers(${holder} PRIVATE ${STRETTO_HEADERS_${group}})
  endif()
  target_precompile_headers(${target} REUSE_FROM ${holder})
endfunction()
