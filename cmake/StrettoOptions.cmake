# Language, warnings, sanitizers, compiler cache and linker: what every target shares.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release)
endif()

find_program(STRETTO_CCACHE ccache)
if(STRETTO_CCACHE)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${STRETTO_CCACHE})
endif()

find_package(Threads REQUIRED)
add_library(stretto_flags INTERFACE)
target_include_directories(stretto_flags INTERFACE ${CMAKE_SOURCE_DIR})
# -ffp-contract=off: a product followed by a sum is fused only where the code says so; the bits of
# a result must not depend on what the compiler saw fit to contract.
target_compile_options(stretto_flags INTERFACE -Wall -Wextra -Werror -ffp-contract=off)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  # GCC 12 reports overlaps inside std::string that cannot happen (GCC bug 105651).
  target_compile_options(stretto_flags INTERFACE -Wno-restrict)
endif()
target_link_libraries(stretto_flags INTERFACE Threads::Threads)

find_program(STRETTO_MOLD mold)
if(STRETTO_MOLD AND NOT STRETTO_SANITIZE)
  add_link_options(-fuse-ld=mold)
endif()

if(STRETTO_SANITIZE)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # Instrumented code makes GCC 12 see uninitialized std::function objects that are none
    # (GCC bug 105562).
    target_compile_options(stretto_flags INTERFACE -Wno-maybe-uninitialized)
  endif()
  add_compile_options(-fsanitize=${STRETTO_SANITIZE} -fno-omit-frame-pointer -g1)
  add_link_options(-fsanitize=${STRETTO_SANITIZE})
  if(STRETTO_SANITIZE MATCHES "undefined")
    add_compile_options(-fno-sanitize-recover=undefined)
  endif()
endif()
