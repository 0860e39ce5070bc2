# find_package(mlfab): gives the target mlfab::mlfab. This file is in LIBDIR/cmake/mlfab, and finds the
# libraries and the header from there, so that an installation can be moved.
include(CMakeFindDependencyMacro)
set(THREADS_PREFER_PTHREAD_FLAG ON)
find_dependency(Threads)

get_filename_component(mlfab_libdir "${CMAKE_CURRENT_LIST_DIR}/../.." ABSOLUTE)
set(mlfab_static "${mlfab_libdir}/libmlfab.a")
set(mlfab_shared "${mlfab_libdir}/libmlfab.so")
# LIBDIR may be lib, lib64, or lib/<architecture>.
set(mlfab_include "")
foreach(folder "${mlfab_libdir}/../include" "${mlfab_libdir}/../../include")
  if(NOT mlfab_include AND EXISTS "${folder}/mlfab.h")
    get_filename_component(mlfab_include "${folder}" ABSOLUTE)
  endif()
endforeach()

if(NOT TARGET mlfab::mlfab)
  if(EXISTS "${mlfab_shared}" AND (BUILD_SHARED_LIBS OR NOT EXISTS "${mlfab_static}"))
    add_library(mlfab::mlfab SHARED IMPORTED)
    set_target_properties(mlfab::mlfab PROPERTIES IMPORTED_LOCATION "${mlfab_shared}")
  elseif(EXISTS "${mlfab_static}")
    add_library(mlfab::mlfab STATIC IMPORTED)
    set_target_properties(mlfab::mlfab PROPERTIES IMPORTED_LOCATION "${mlfab_static}")
  endif()
endif()

if(NOT TARGET mlfab::mlfab OR NOT mlfab_include)
  set(mlfab_FOUND FALSE)
  set(mlfab_NOT_FOUND_MESSAGE "no libmlfab.a or libmlfab.so in ${mlfab_libdir}, or no mlfab.h")
else()
  set_target_properties(mlfab::mlfab PROPERTIES
    INTERFACE_INCLUDE_DIRECTORIES "${mlfab_include}"
    INTERFACE_LINK_LIBRARIES "Threads::Threads;m")
endif()
