# find_package(terrace) gives terrace::terrace (all of it) and terrace::cpu_adam (usable alone).
include(CMakePackageConfigHelpers)
get_property(libraries GLOBAL PROPERTY TERRACE_LIBRARIES)
install(TARGETS ${libraries} EXPORT terrace-targets)
install(DIRECTORY include/terrace DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h")
if(TARGET terrace_tool)
  install(TARGETS terrace_tool)
endif()
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/terrace)
install(EXPORT terrace-targets NAMESPACE terrace:: DESTINATION ${package_dir})
configure_package_config_file(cmake/terrace-config.cmake.in
  ${CMAKE_CURRENT_BINARY_DIR}/terrace-config.cmake INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/terrace-config-version.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/terrace-config.cmake
  ${CMAKE_CURRENT_BINARY_DIR}/terrace-config-version.cmake DESTINATION ${package_dir})
